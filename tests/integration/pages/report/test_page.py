"""Tests of the page of a run on an object store, and of a real run."""

from collections.abc import Callable
from typing import Any

import pytest
from failing_storage import CREDENTIALS, S3Server, storage_path
from page_samples import NOW, Page, assert_harmless, write_run
from small_runs import groups_of

from grpo_ray import cli
from grpo_ray.pages.report import render
from grpo_ray.pages.report.groups import first_and_last_groups
from grpo_ray.pages.report.read import read_run


def test_report_s3_run_writes_page_there(s3_process: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    key, secret = CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
    where = storage_path(s3_process.port, user=f"{key}:{secret}@")
    folder = write_run(where, "reported")
    path, _, query = where.partition("?")
    assert cli.main(["report", f"{path}/reported?{query}"]) == 0
    printed = capsys.readouterr()
    page = folder.read_text("report.html")
    assert_harmless(Page(page))
    assert "0.235 → 0.900" in page
    assert printed.out.startswith("s3://bucket/runs/reported/report.html")
    assert secret not in page + printed.out + printed.err


@pytest.mark.slow
def test_page_real_run_keeps_texts_of_each_step(
    small_run: Callable[..., Any],
) -> None:
    kept = []
    for workers in (1, 2):
        _, folder = small_run(f"workers-{workers}", f"cluster.num_workers={workers}", "grpo.max_steps=3")
        rows = [row for row in groups_of(folder) if row["completions"] is not None]
        assert [row["step"] for row in rows if row["sample"] == "first"] == [1, 2, 3]
        for row in rows:
            assert row["prompt"] and len(row["completions"]) == len(row["rewards"])
        kept.append([(row["problem"], row["prompt"]) for row in rows])
        first, last = first_and_last_groups(read_run(str(folder)))
        assert {group.step for group in (*first, *last)} == {1, 2, 3}
        assert "finished" in Page(render([read_run(str(folder))], NOW)).text
    assert kept[0] == kept[1]
