from grpo_ray.board import Board


def test_a_new_board_is_starting_and_has_no_entries():
    assert Board().read(0) == ("starting", [])


def test_a_board_gives_the_present_phase_and_the_entries_not_yet_read():
    board = Board()
    board.phase("loading libraries")
    board.phase("training")
    board.happened("began", step=0, workers=2)
    board.row({"step": 1})
    board.happened("failed", rank=1, what="it died")
    phase, entries = board.read(0)
    assert phase == "training"
    assert [entry["event"] for entry in entries] == ["began", "step", "failed"]
    assert entries[0]["workers"] == 2 and entries[1]["row"] == {"step": 1} and entries[2]["rank"] == 1
    assert [entry["event"] for entry in board.read(2)[1]] == ["failed"]
    assert board.read(3) == ("training", [])


def test_every_entry_has_the_time_of_its_arrival_by_one_clock():
    board = Board()
    for step in range(3):
        board.row({"step": step})
    times = [entry["at"] for entry in board.read(0)[1]]
    assert times == sorted(times) and times[0] > 1.7e9


def test_reading_a_board_takes_nothing_off_it():
    board = Board()
    board.row({"step": 1})
    assert board.read(0) == board.read(0)


def test_the_board_shows_the_round_that_was_begun_last():
    board = Board()
    assert board.round() is None
    board.begin_round("first")
    board.begin_round("second")
    assert board.round() == board.round() == "second"
