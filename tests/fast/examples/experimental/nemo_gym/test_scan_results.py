"""The results file: appended, locked, resumed; whatever is not this scan's is left alone."""

import json
import os

import pytest
from scan_input import SetUpError
from scan_results import as_record, fingerprint, open_results, read_record, write_ids
from scan_statistics import Episode, solve_rate
from task_selection import read_ids, read_solve_rates

TASKS = {f"a__b-{number}": f"row{number}" for number in range(1, 6)}


def _episode(number: int, *, kind: str = "gold", attempt: int = 1, reward: float | None = 1.0, **fields) -> Episode:
    status = "SandboxUnavailable" if reward is None else "Submitted"
    fields = {"task": f"row{number}", "repo": "a/b", "seconds": 1.25, **fields}
    return Episode(f"a__b-{number}", kind=kind, attempt=attempt, reward=reward, exit_status=status, **fields)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


def _write(path, *episodes: Episode, **options) -> None:
    with open_results(path, **{"golden": True, "tasks": TASKS, **options}) as results:
        for episode in episodes:
            results.add(episode, {"tests": ["é"]})


def _read(path, **options) -> list[Episode]:
    with open_results(path, **{"golden": True, "tasks": TASKS, **options}) as results:
        return results.episodes


def _refusal(path, **options) -> str:
    before = path.read_bytes()
    with pytest.raises(SetUpError) as raised:
        _read(path, **options)
    assert path.read_bytes() == before
    return str(raised.value)


def test_what_was_added_is_read_again(path):
    episodes = [
        _episode(1, agent_metrics={"turns": 3}, detail='a "line"\n'),
        _episode(1, kind="null", reward=0.0),
        _episode(2, attempt=2, reward=None),
    ]
    _write(path, *episodes)
    assert _read(path) == episodes
    lines = path.read_text().splitlines()
    assert [json.loads(line)["pass"] for line in lines] == [True, True, False]
    assert json.loads(lines[0])["eval_report"] == {"tests": ["é"]}


def test_without_a_path_nothing_is_written(tmp_path):
    _write(None, _episode(1))
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_a_result_is_not_left_behind(path):
    _write(path)
    assert not path.exists()


def test_wherever_the_last_line_was_cut_only_that_episode_is_missing(path):
    first, second = _episode(1), _episode(2)
    _write(path, first, second)
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert _read(path) == [first], cut
        assert path.read_bytes() == whole[:cut], "a scan that writes nothing changes nothing"
        _write(path, second)
        assert path.read_bytes() == whole, cut


def test_a_last_line_that_lacks_its_end_only_is_kept(path):
    first, second = _episode(1), _episode(2)
    _write(path, first, second)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert _read(path) == [first, second]
    _write(path, _episode(3))
    assert path.read_bytes().startswith(whole) and _read(path) == [first, second, _episode(3)]


def test_a_cut_first_line_is_all_there_is(path):
    path.write_bytes(b'{"instance_id": "a__b-1", "rep')
    _write(path, _episode(1))
    assert _read(path) == [_episode(1)]


def test_of_two_lines_for_one_episode_the_later_counts(path):
    _write(path, _episode(1, reward=None), _episode(2))
    with open_results(path, golden=True, tasks=TASKS) as results:
        results.drop_inconclusive()
        assert _episode(1).key not in results and _episode(2).key in results
        results.add(_episode(1), {})
    assert _read(path) == [_episode(2), _episode(1)]
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "content, said",
    [
        ("notes of mine", "line 1"),
        ("notes of mine\n", "line 1"),
        ('{"prompt": "p", "metadata": {}}\n', "line 1: expected an episode, found one without 'instance_id'"),
        ("[1]\n", "line 1: expected a JSON object, found list"),
        ("17", "line 1: expected a JSON object, found int"),
        ('{"instance_id": "a__b-1", \n', "line 1"),
        (b"\xff\xfe\n", "line 1"),
    ],
)
def test_a_file_of_something_else_is_refused(path, content, said):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = _refusal(path)
    assert said in message and "left as it is" in message


@pytest.mark.parametrize(
    "change, said",
    [
        ({"attempt": "1"}, "'attempt'"),
        ({"reward": True}, "'reward'"),
        ({"exit_status": "Sumbitted"}, "Sumbitted"),
        ({"kind": "golden"}, "golden"),
        ({"reward": None}, "Submitted with reward None"),
    ],
)
def test_a_line_that_is_no_episode_is_named(path, change, said):
    _write(path, _episode(1))
    record = {**json.loads(path.read_text()), **change}
    with pytest.raises(ValueError, match=said):
        read_record(record)


def test_a_half_line_in_the_middle_is_refused(path):
    _write(path, _episode(1), _episode(2))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first[:40] + b"\n" + second)
    assert "line 1" in _refusal(path)


def test_a_scan_of_the_other_kind_is_refused(path):
    _write(path, _episode(1, kind="policy", policy="m"), golden=False)
    assert "expected" in _refusal(path) and "policy a__b-1" in _refusal(path)
    os.unlink(path)
    _write(path, _episode(1))
    assert "gold a__b-1" in _refusal(path, golden=False)


@pytest.mark.parametrize("name, value, said", [("policy", "other", '"other"'), ("sampling", {}, "none")])
def test_another_policy_or_sampling_is_refused_with_both_named(path, name, value, said):
    _write(path, _episode(1, kind="policy", policy="m", sampling={"temperature": 0.7}), golden=False)
    with open_results(path, golden=False, tasks=TASKS) as results:
        results.check("policy", "m")
        results.check("sampling", {"temperature": 0.7})
        with pytest.raises(SetUpError, match=said) as raised:
            results.check(name, value)
    assert "a__b-1" in str(raised.value) and "name another file" in str(raised.value)


def test_another_row_under_the_same_id_is_refused(path):
    _write(path, _episode(1))
    assert "a__b-1" in _refusal(path, tasks={"a__b-1": "changed"})
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})


def test_tasks_of_other_inputs_are_kept_and_not_counted(path):
    _write(path, _episode(1), _episode(2))
    before = path.read_bytes()
    with open_results(path, golden=True, tasks={"a__b-2": "row2", "a__b-3": "row3"}) as results:
        assert results.episodes == [_episode(2)] and results.others == [_episode(1)]
        results.add(_episode(3), {})
    assert path.read_bytes().startswith(before) and len(_read(path)) == 3


def test_one_scan_at_a_time(path):
    with open_results(path, golden=True, tasks=TASKS) as results:
        for _ in range(2):
            with pytest.raises(SetUpError, match="another one writing it"):
                _read(path)
        assert path.exists(), "the one that was refused does not remove the other's file"
        results.add(_episode(1), {})
    assert _read(path) == [_episode(1)]


def test_a_finished_file_is_set_aside_under_its_lock(path):
    _write(path, _episode(1))
    before = path.read_bytes()
    with open_results(path, golden=True, tasks=TASKS) as results:
        previous = results.set_aside()
        assert results.episodes == [] and previous.read_bytes() == before
        with pytest.raises(SetUpError, match="another one writing it"):
            _read(path)
        results.add(_episode(2), {})
    assert _read(path) == [_episode(2)] and previous.name == "results.jsonl.previous"


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_what_cannot_be_written_is_named(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(SetUpError, match="expected to write --output .*results.jsonl, found: "):
        _write(tmp_path / folder / "results.jsonl", _episode(1))
    with pytest.raises(SetUpError, match="expected to write --supported-ids .*ids.txt, found: "):
        write_ids(tmp_path / folder / "ids.txt", ["a__b-1"])


def test_ids_are_written_in_one_step(tmp_path):
    path = tmp_path / "ids.txt"
    path.write_text("old\n")
    write_ids(path, ["a__b-2", "a__b-1"])
    assert path.read_text() == "a__b-2\na__b-1\n" and [one.name for one in tmp_path.iterdir()] == ["ids.txt"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_lines_and_ids_are_what_the_data_script_reads(tmp_path):
    rewards = {"psf__requests-1": [1.0, 0.0, None], "psf__requests-2": [0.0], "psf__requests-3": [None]}
    episodes = [
        Episode(
            instance_id=instance_id,
            repo="psf/requests",
            kind="policy",
            attempt=attempt,
            reward=reward,
            exit_status="ServerUnreachable" if reward is None else "Submitted",
            seconds=1.5,
        )
        for instance_id, of_task in rewards.items()
        for attempt, reward in enumerate(of_task, start=1)
    ]
    scan = tmp_path / "policy.jsonl"
    scan.write_text("".join(f"{json.dumps(as_record(episode, {'eval_report': {}}))}\n" for episode in episodes))
    its_own = {name: solve_rate(one for one in episodes if one.instance_id == name).rate for name in rewards}
    assert read_solve_rates(scan) == {name: rate for name, rate in its_own.items() if rate is not None}
    write_ids(tmp_path / "supported.txt", rewards)
    assert read_ids(tmp_path / "supported.txt", option="--only") == rewards.keys()
