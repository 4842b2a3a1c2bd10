"""Tests of the answers to the page: pages of lists, refused parameters, state before and after the first reading."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from page_samples import make_group, write_run
from starlette.exceptions import HTTPException

from grpo_ray.pages.watch import api
from grpo_ray.pages.watch.api import answer
from grpo_ray.pages.watch.live_run import LiveRun
from grpo_ray.pages.watch.refresher import Refresher, View
from grpo_ray.storage.records.rollout_files import write_rollouts
from grpo_ray.storage.run_folder import RunFolder

GROUPS = [make_group(step, f"{step:016x}", (1.0, 0.0), texts=("yes", "no")) for step in range(1, 8)]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return write_run(tmp_path, groups=GROUPS)


@pytest.fixture
def refresher(folder: RunFolder) -> Refresher:
    refresher = Refresher(LiveRun(folder))
    refresher.refresh()
    return refresher


def get(refresher: Refresher, path: str, **values: Any) -> dict[str, Any]:
    found = answer(path, refresher.view, {name: str(value) for name, value in values.items()})
    json.dumps(found, allow_nan=False)
    return found


def test_state_before_the_first_reading_has_no_number() -> None:
    state = answer("state", View(), {})
    assert (state["number"], state["problem"], state["read_at"]) == (None, None, None)
    with pytest.raises(HTTPException, match="being read") as raised:
        answer("groups", View(), {})
    assert raised.value.status_code == 503


def test_state_has_status_and_counts(refresher: Refresher) -> None:
    state = get(refresher, "state")
    assert (state["number"], state["name"], state["step"], state["max_steps"]) == (1, "run", 40, 40)
    assert (state["groups"], state["samples"], state["last_group_step"]) == (7, 7, 7)
    assert state["status"] == {"level": "ok", "text": "finished"} and state["heldout"] == []


def test_groups_pages_of_a_growing_run_fit_together(
    refresher: Refresher, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "PAGE_GROUPS", 3)
    first = get(refresher, "groups")
    assert [each["step"] for each in first["groups"]] == [7, 6, 5] and first["next"] == 3 and first["total"] == 7
    write_rollouts(folder, [make_group(8, "f" * 16, (1.0, 0.0), texts=("a", "b"))])
    refresher.refresh()
    second = get(refresher, "groups", skip=first["next"], until=first["until"])
    assert [each["step"] for each in second["groups"]] == [4, 3, 2]
    last = get(refresher, "groups", skip=second["next"], until=first["until"])
    assert [each["step"] for each in last["groups"]] == [1] and last["next"] is None
    assert [each["step"] for each in get(refresher, "groups")["groups"]] == [8, 7, 6]


def test_groups_search_counts_what_was_searched(refresher: Refresher) -> None:
    found = get(refresher, "groups", text="YES", last=5, order="oldest")
    assert [each["step"] for each in found["groups"]] == [1, 2, 3, 4, 5]
    assert (found["total"], found["searched"], found["next"]) == (5, 5, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"first": "-1"}, "first='-1' must be a whole number"),
        ({"last": "1e3"}, "last='1e3' must be"),
        ({"skip": "9" * 30}, "skip"),
        ({"low": "nan"}, "low='nan' must be a number"),
        ({"high": "much"}, "high='much' must be a number"),
        ({"order": "sideways"}, "order must be one of newest"),
        ({"outcome": "x"}, "outcome must be one of"),
        ({"text": "x" * 201}, "text has 201 characters"),
        ({"text": "x", "order": "highest"}, "a search lists groups by step"),
    ],
)
def test_groups_wrong_parameter_is_refused(refresher: Refresher, values: dict[str, str], message: str) -> None:
    with pytest.raises(HTTPException, match=message) as raised:
        get(refresher, "groups", **values)
    assert raised.value.status_code == 400


def test_group_is_found_by_step_epoch_and_problem(refresher: Refresher) -> None:
    group = get(refresher, "group", step=3, epoch=0, problem=f"{3:016x}")
    assert [each["text"] for each in group["completions"]] == ["yes", "no"]
    with pytest.raises(HTTPException, match="does not exist any more"):
        get(refresher, "group", step=3, epoch=0, problem="other")


def test_group_of_a_file_that_is_gone_is_an_answer(refresher: Refresher, folder: RunFolder) -> None:
    folder.delete_folder("rollouts")
    with pytest.raises(HTTPException, match="cannot be read now") as raised:
        get(refresher, "group", step=3, epoch=0, problem=f"{3:016x}")
    assert raised.value.status_code == 503


def test_problems_and_changes_answer(refresher: Refresher) -> None:
    assert get(refresher, "problems")["total"] == 7
    with pytest.raises(HTTPException, match="no records"):
        get(refresher, "changes", set="heldout", before=0, after=10)
    with pytest.raises(HTTPException, match="no such page"):
        get(refresher, "secrets")


def test_refresher_gone_folder_keeps_the_state(refresher: Refresher, folder: RunFolder) -> None:
    assert folder.local is not None
    folder.local.rename(folder.local.with_name("other"))
    read_at = refresher.view.read_at
    refresher.refresh()
    state = get(refresher, "state")
    assert "is not there any more" in state["problem"] and state["number"] == 1 and state["read_at"] == read_at
    folder.local.with_name("other").rename(folder.local)
    refresher.refresh()
    assert get(refresher, "state")["problem"] is None


def test_refresher_thread_reads_when_it_is_asked(folder: RunFolder) -> None:
    refresher = Refresher(LiveRun(folder))
    refresher.start()
    end = time.monotonic() + 60
    while refresher.want().snapshot is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    refresher.stop()
    assert b"Held-out accuracy" in refresher.view.contents
