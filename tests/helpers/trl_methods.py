"""Digests of the methods of TRL that the package overrides or calls."""

from trl import GRPOTrainer, SFTTrainer
from trl.generation.vllm_generation import VLLMGeneration

# On failure: read TRL's change, check that our code still holds, then write the new digest here.
EXTENDED = {
    GRPOTrainer.get_train_dataloader: "534e46c599bd",
    GRPOTrainer._prepare_inputs: "5af3fd0e0586",
    GRPOTrainer.get_high_entropy_mask: "b25108dca83f",
    GRPOTrainer._get_per_token_logps_and_entropies: "2e6159c321dd",
    GRPOTrainer._compute_loss: "a0773aa2fda0",
    GRPOTrainer.training_step: "7898429a4570",
    GRPOTrainer._clip_grad_norm: "fb4c4aaa5ca2",
    GRPOTrainer._save_checkpoint: "a7d3627bdf46",
    GRPOTrainer.create_accelerator_and_postprocess: "994a9c1a1acf",
    GRPOTrainer.save_model: "9b7a7153a61d",
    GRPOTrainer._save_optimizer_and_scheduler: "2305ff67d111",
    GRPOTrainer._save: "d0a4f39fea8e",
    GRPOTrainer._load_from_checkpoint: "630bea1fd535",
    GRPOTrainer._load_optimizer_and_scheduler: "15c2ddb9d080",
    GRPOTrainer.create_model_card: "1e539ccd6f9d",
    GRPOTrainer.create_optimizer: "9f3aa0611cfb",
    VLLMGeneration.__init__: "025191f83205",
    VLLMGeneration._init_vllm: "43c55871b974",
    VLLMGeneration.sync_weights: "3e327f709687",
    VLLMGeneration._iter_named_params: "5a0440418513",
}
"""Methods that we override -> their digest."""

CALLED = {
    GRPOTrainer._generate_and_score_completions: "eb8ae2f174e2",
    GRPOTrainer._generate: "5b18ab8db4bd",
    GRPOTrainer._calculate_rewards: "998e87670197",
    GRPOTrainer._tokenize_prompts: "a31e6fde43e8",
    GRPOTrainer.get_gamma_weights: "c614cf24793d",
}
"""Methods that we call, whose results ours must equal, or that an exact saving relies on -> their digest."""

SFT_METHODS = {
    SFTTrainer.get_train_dataloader: "c4e4e26e0f31",
    SFTTrainer.training_step: "d8c7c8fc6ea0",
    SFTTrainer._save_checkpoint: "0aa0cbee36d3",
    SFTTrainer._save: "d0a4f39fea8e",
    SFTTrainer._load_from_checkpoint: "630bea1fd535",
    SFTTrainer._load_optimizer_and_scheduler: "3c68e6bb85f4",
    SFTTrainer.create_model_card: "1e539ccd6f9d",
    SFTTrainer.compute_loss: "337f03c9d4c0",
    SFTTrainer._get_num_items_in_batch: "c5edf146737f",
}
"""Methods of TRL's trainer of supervised fine-tuning that we override, or on whose results we rely -> their digest."""
