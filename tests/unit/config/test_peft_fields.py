"""Settings of `model.peft`: one line for each mistake, and the arguments that reach PEFT."""

import pytest

from grpo_ray.config.loader import from_mapping, load_config
from grpo_ray.config.peft_fields import REFUSED_FIELDS, REFUSED_TYPES, peft_arguments, peft_types
from grpo_ray.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{}", "model.peft.type is required: one of BEFT, BOFT"),
        ("{type: 5}", "model.peft.type=5 is no type of adapter; it is one of BEFT, BOFT"),
        ("{type: lora}", "model.peft.type='lora' is no type of adapter; did you mean LORA"),
        ("{type: ADALORA}", "model.peft.type=ADALORA needs its ranks reallocated"),
        ("{type: PREFIX_TUNING}", "model.peft.type=PREFIX_TUNING adds tokens or keys"),
        ("{type: LORA, rank_patern: 3}", "model.peft.rank_patern is not a field of LORA in PEFT; did you mean"),
        ("{type: OFT, use_dora: true}", "model.peft.use_dora is not a field of OFT"),
        ("{type: LORA, r: 8.5}", "model.peft.r=8.5 must be a whole number"),
        ("{type: LORA, bias: some}", 'model.peft.bias=\'some\' must be "all", "lora_only" or "none"'),
        ("{type: LORA, use_dora: 1}", "model.peft.use_dora=1 must be true or false"),
        ("{type: LORA, modules_to_save: norm}", "model.peft.modules_to_save='norm' must be a list, or null"),
        ("{type: LORA, megatron_core: os}", "model.peft.megatron_core names a module to import"),
        ("{type: LORA, init_lora_weights: eva}", "model.peft.init_lora_weights='eva' needs a pass over data"),
        ("{type: VBLORA, save_only_topk_weights: true}", "save_only_topk_weights=True writes checkpoints"),
        ("{type: LORA, inference_mode: true}", "model.peft.inference_mode is derived"),
        ("{type: LORA, lora_dropout: 1.5}", "model.peft.lora_dropout=1.5 must be a number of at least 0 and below 1"),
        ("{type: OFT, num_cayley_neumann_terms: 1}", "model.peft.num_cayley_neumann_terms=1 must be at least 2"),
        ("{type: LORA, trainable_token_indices: []}", "trainable_token_indices=[] must name at least one token"),
        ("{type: LN_TUNING, target_modules: [norm], modules_to_save: norm}", "modules_to_save='norm' must be a list"),
        ("{type: LORA, init_lora_weights: pissa_niter_4}", "begins with random numbers that no export has"),
        ("{type: LN_TUNING}", "model.peft.type=LN_TUNING does not adapt every linear layer; set"),
    ],
)
def test_peft_settings_invalid_are_refused(settings: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"model.peft={settings}"])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_peft_settings_each_mistake_has_a_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model.peft={type: LORA, r: x, use_dora: y}"])
    assert len(str(caught.value).splitlines()) == 2


def test_peft_settings_survive_yaml() -> None:
    settings = {"type": "LORA", "r": 16, "use_dora": True, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 4}}
    config = from_mapping({"model": {"peft": settings}})
    assert config.model.adapter == settings
    assert from_mapping(config.to_dict()) == config


def test_peft_arguments_adapt_every_linear_layer_by_default() -> None:
    assert peft_arguments({"type": "OFT", "r": 4}) == {"r": 4, "target_modules": "all-linear"}
    assert peft_arguments({"type": "LN_TUNING", "target_modules": ["norm"]}) == {"target_modules": ["norm"]}
    assert peft_arguments({"type": "FROD"}) == {"target_modules": "all-linear", "progressbar": False}


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({"type": "LORA"}, False),
        ({"type": "LORA", "init_lora_weights": "gaussian"}, False),
        ({"type": "LORA", "init_lora_weights": False}, True),
        ({"type": "LORA", "init_lora_weights": "olora"}, True),
        ({"type": "LORA", "bias": "all"}, True),
        ({"type": "HRA"}, False),
        ({"type": "HRA", "r": 7}, True),
        ({"type": "DEFT", "para": True}, True),
        ({"type": "FOURIERFT"}, True),
        ({"type": "FOURIERFT", "init_weights": True}, False),
        ({"type": "VBLORA"}, True),
    ],
    ids=str,
)
def test_reference_must_be_the_first_policy(settings: dict[str, object], is_refused: bool) -> None:
    def build() -> object:
        return from_mapping({"model": {"peft": settings}, "grpo": {"beta": 0.1}})

    if is_refused:
        with pytest.raises(ConfigError, match="the reference is the policy without the adapter"):
            build()
    else:
        build()


def test_lora_is_the_short_form() -> None:
    config = load_config(None, ["model.lora={rank: 4, alpha: 8, dropout: 0.1, target_modules: [q_proj]}"])
    assert config.model.adapter == {
        "type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj"],
    }  # fmt: skip
    assert load_config().model.adapter is None


def test_tables_name_what_exists() -> None:
    assert not REFUSED_TYPES.keys() & peft_types().keys()
    assert REFUSED_FIELDS.keys() <= {name for fields in peft_types().values() for name in fields}
    assert all("target_modules" in fields for fields in peft_types().values())
