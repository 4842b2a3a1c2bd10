"""Test of a policy that moves between folders and a real S3 server."""

from pathlib import Path

import pyarrow.fs
from failing_storage import S3Server, storage_path

from grpo_ray.models.policy_digest import BLOCK_BYTES, BLOCKS, changed_parts, policy_contents
from grpo_ray.storage.run_folder import RunFolder


def test_policy_contents_are_the_same_in_a_folder_and_on_s3(s3_server: S3Server, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(range(256)) * (BLOCKS * BLOCK_BYTES // 64)  # 4 MiB, of which blocks are read
    (tmp_path / "model.safetensors").write_bytes(weights)
    local = policy_contents(str(tmp_path))
    for prefix in ("policies", "moved"):
        RunFolder(storage_path(s3_server.port, folder=prefix), "policy").upload(tmp_path)
        assert policy_contents(storage_path(s3_server.port, folder=f"{prefix}/policy"), 60) == local
    filesystem, path = pyarrow.fs.FileSystem.from_uri(storage_path(s3_server.port, folder="moved/policy"))
    weights[-1] ^= 1
    with filesystem.open_output_stream(f"{path}/model.safetensors") as file:
        file.write(weights)
    changed = policy_contents(storage_path(s3_server.port, folder="moved/policy"), 60)
    assert changed_parts(local, changed) == ("weights",)
