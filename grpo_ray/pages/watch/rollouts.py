"""Index of a run's groups for the viewer: filters, order, pages, and search in the recorded texts.

The index holds a few numbers per group and no texts. Texts and tokens are read from their file when they are shown.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from grpo_ray.errors import DataError
from grpo_ray.pages.report.conversation_view import show_in_json
from grpo_ray.storage.records.group_columns import CONVERSATION_COLUMNS, groups_table, solve_counts
from grpo_ray.storage.records.rollout_files import RolloutFile, list_rollout_files, read_rollout_file
from grpo_ray.storage.records.tokens import importance_ratios
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.text.display import make_visible, safe_text

if TYPE_CHECKING:
    import pyarrow as pa

SEARCH_SECONDS = 1.0
"""Time after which a search returns its results so far; the viewer requests the rest."""
MAX_TEXT_CHARS = 8192
"""Most characters of a text; files of runs have at most half as many."""
MAX_ID_CHARS = 64
MAX_SOURCES = 100
PROMPT_CHARS = 120
"""Characters of a prompt in a list."""
EXCERPT_CHARS = 160
"""Characters around a match."""
MAX_COMPLETIONS, MAX_TOKENS = 256, 4096
"""Completions of a group and tokens of a completion that are shown; files of runs have at most half as many."""

Order = Literal["newest", "oldest", "highest", "lowest"]
Outcome = Literal["any", "mixed", "all", "none"]
ProblemOrder = Literal["gained", "lost", "hardest", "easiest"]


@dataclass(frozen=True, kw_only=True)
class GroupQuery:
    """Filter and order of a list of groups."""

    first_step: int = 0
    last_step: int | None = None
    problem: str = ""
    """Beginning of the problem's id."""
    source: str = ""
    """Source of a mixture; "" for all."""
    outcome: Outcome = "any"
    """Groups with correct and wrong completions, with correct ones only, with none, or all groups."""
    min_reward: float = -math.inf
    max_reward: float = math.inf
    """Range of the mean reward; without it, groups of unknown reward are included."""
    with_texts: bool = False
    """True: only groups whose texts were recorded."""
    order: Order = "newest"


@dataclass(frozen=True)
class _FileRows:
    """Rows of one file."""

    file: RolloutFile
    groups: "pa.Table"
    """Columns of `groups_table` without texts."""
    prompts: "pa.ChunkedArray"
    """(rows,), beginning of the prompt of each group with texts; null for the others."""


class RolloutIndex:
    """Groups of a run at one time, in the order of steps."""

    def __init__(self, folder: RunFolder, parts: Sequence[_FileRows], notes: Sequence[str]):
        import pyarrow as pa
        import pyarrow.compute as pc

        self._folder = folder
        self.files = [part.file for part in parts]
        self.notes = list(notes)
        self.groups = pa.concat_tables([groups_table([]), *(part.groups for part in parts)])
        """One row per group, without texts."""
        self.step = self.groups["step"].to_numpy()
        self._starts = np.cumsum([0, *(len(part.groups) for part in parts)])
        """(files + 1,), index of the first row of each file, then the number of rows."""
        self._prompts = pa.chunked_array([chunk for part in parts for chunk in part.prompts.chunks], pa.string())
        self.has_texts = pc.is_valid(self._prompts).to_numpy()
        problems = self.groups["problem"].combine_chunks().dictionary_encode()
        if isinstance(problems, pa.ChunkedArray):  # in older versions of pyarrow, even for one chunk
            problems = problems.combine_chunks()
        self.problem = problems.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        """(N,) position of each group's problem in `ids`."""
        self.ids: list[str] = problems.dictionary.to_pylist()
        self.known, self.right, _ = solve_counts(self.groups)
        self.reward = _group_means(self.groups["rewards"])
        self._lower_ids = pc.utf8_lower(problems.dictionary)

    def __len__(self) -> int:
        return len(self.step)

    def select(self, query: GroupQuery) -> NDArray[np.intp]:
        """Return the indices of the groups that match a query, in its order."""
        import pyarrow.compute as pc

        chosen = self.step >= query.first_step
        if query.last_step is not None:
            chosen &= self.step <= query.last_step
        if query.with_texts:
            chosen &= self.has_texts
        if query.problem:
            fits = pc.starts_with(self._lower_ids, query.problem.lower()).to_numpy(zero_copy_only=False)
            # The last value is that of the groups without a problem, whose position is -1.
            chosen &= np.append(fits.astype(bool), False)[self.problem]
        if query.source:
            chosen &= pc.equal(self.groups["source"], query.source).fill_null(False).to_numpy()
        if query.outcome != "any":
            chosen &= self.known > 0
            is_all, is_none = self.right == self.known, self.right == 0
            chosen &= {"all": is_all, "none": is_none, "mixed": ~is_all & ~is_none}[query.outcome]
        if query.min_reward > -math.inf or query.max_reward < math.inf:
            chosen &= (self.reward >= query.min_reward) & (self.reward <= query.max_reward)
        rows = np.flatnonzero(chosen)
        if query.order == "newest":
            return rows[::-1]
        if query.order == "oldest":
            return rows
        rows = rows[::-1]  # among equal rewards the newest first; unknown rewards last
        keys = np.where(
            np.isnan(self.reward[rows]), np.inf, self.reward[rows] * (-1 if query.order == "highest" else 1)
        )
        return rows[np.argsort(keys, kind="stable")]

    def describe(self, rows: Sequence[int] | NDArray[np.intp]) -> list[dict[str, Any]]:
        """Return the numbers of some groups as JSON."""
        records = self.groups.take(np.asarray(rows, dtype=np.int64)).to_pylist()
        described = []
        for row, record in zip(rows, records, strict=True):
            record |= {name: safe_text(record[name] or "", MAX_ID_CHARS) for name in ("problem", "source")}
            for name in ("rewards", "correct", "lengths", "truncated"):
                record[name] = [_number(value) for value in (record[name] or [])[:MAX_COMPLETIONS]]
            record |= {"reward": _number(self.reward[row]), "has_texts": bool(self.has_texts[row])}
            described.append(record | {"prompt": self._prompt_of(row)})
        return described

    def _prompt_of(self, row: int) -> str | None:
        """Return the beginning of a group's prompt on one line; None if its texts were not recorded."""
        prompt = self._prompts[int(row)].as_py()
        return None if prompt is None else safe_text(" ".join(prompt.split()), PROMPT_CHARS)

    def search(
        self, text: str, rows: NDArray[np.intp], skip: int, limit: int, seconds: float = SEARCH_SECONDS
    ) -> tuple[list[dict[str, Any]], int | None]:
        """Search for a text in prompts, completions and messages, ignoring case.

        Args:
            text: Searched text.
            rows: Groups with texts, in the order of steps or its reverse.
            skip: Rows that an earlier call has searched.
            limit: Most groups returned.
            seconds: Time after which the search returns, in seconds; at least one file is searched.

        Returns:
            The groups in which the text occurs, each with an excerpt; and the number of rows searched so far, None if
            all were searched.
        """
        end = time.monotonic() + seconds
        found: list[dict[str, Any]] = []
        at = skip
        while at < len(rows):
            number = int(np.searchsorted(self._starts, rows[at], side="right")) - 1
            inside = rows[at:]
            inside = inside[(inside >= self._starts[number]) & (inside < self._starts[number + 1])]
            matches = self._search_file(number, text)
            for row in inside:
                at += 1
                if (match := matches.get(int(row - self._starts[number]))) is not None:
                    found.append(self.describe([row])[0] | {"excerpt": match})
                    if len(found) == limit:
                        return found, at if at < len(rows) else None
            if time.monotonic() > end:
                break
        return found, at if at < len(rows) else None

    def _search_file(self, number: int, text: str) -> dict[int, str]:
        """Return a mapping from row of the file to excerpt, for each group whose texts contain `text`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        table = self._read(number, ["prompt", "completions", "messages"])
        options = {"pattern": text, "ignore_case": True}
        in_prompt = pc.match_substring(table["prompt"], **options).fill_null(False).to_numpy()
        completions = table["completions"].combine_chunks()
        if isinstance(completions, pa.ChunkedArray):
            completions = completions.chunk(0) if completions.num_chunks else pa.array([], completions.type)
        parents = pc.list_parent_indices(completions).to_numpy()
        hits = pc.match_substring(completions.flatten(), **options).fill_null(False).to_numpy(zero_copy_only=False)
        rows = np.union1d(np.flatnonzero(in_prompt), parents[hits]).astype(np.int64)
        if table["messages"].null_count < len(table):
            rows = np.union1d(rows, _rows_with_message(table["messages"], options)).astype(np.int64)
        excerpts = {}
        for row, record in zip(rows.tolist(), table.take(rows).to_pylist(), strict=True):
            messages = (message for each in record["messages"] or () for message in each or ())
            parts = ((message or {}).get(name) for message in messages for name in ("content", "name"))
            for value in (record["prompt"], *(record["completions"] or ()), *parts):
                if (excerpt := _excerpt(value or "", text)) is not None:
                    excerpts[row] = excerpt
                    break
        return excerpts

    def sources(self) -> list[str]:
        """Return the names of the sources of a mixture, sorted; none for a single dataset."""
        found = self.groups["source"].unique().to_pylist()
        return sorted(safe_text(name, MAX_ID_CHARS) for name in found if name)[:MAX_SOURCES]

    def find(self, step: int, epoch: int, problem: str) -> int | None:
        """Return the row of a group; None if there is none."""
        for row in np.flatnonzero(self.step == step).tolist():
            code = self.problem[row]
            if code >= 0 and self.ids[code] == problem and self.groups["epoch"][row].as_py() == epoch:
                return row
        return None

    def detail(self, row: int) -> dict[str, Any]:
        """Return a group with its texts and tokens as JSON. Raises DataError if its file cannot be read."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        record = self.describe([row])[0]
        if not record["has_texts"]:
            return record | {"prompt": None, "completions": []}
        step = int(self.step[row])
        place = int(np.count_nonzero(self.step[self._starts[number] : row] == step))
        table = self._read(
            number, ["prompt", "completions", "advantages", "sample", "tokens", *CONVERSATION_COLUMNS], step
        )
        if place >= len(table):
            raise DataError(f"{self.files[number].name} has changed")
        texts = table.slice(place, 1).to_pylist()[0]
        advantages, tokens, results = (texts[name] or [] for name in ("advantages", "tokens", "result_tokens"))
        return record | {
            "prompt": safe_text(texts["prompt"] or "", MAX_TEXT_CHARS),
            "sample": texts["sample"],
            "completions": [
                {
                    "text": safe_text(text or "", MAX_TEXT_CHARS),
                    "reward": _at(record["rewards"], index),
                    "correct": _at(record["correct"], index),
                    "length": _at(record["lengths"], index),
                    "truncated": bool(_at(record["truncated"], index)),
                    "advantage": _number(_at(advantages, index)),
                    "tokens": describe_tokens(tokens[index], _at(record["lengths"], index), _at(results, index))
                    if index < len(tokens)
                    else None,
                    **show_in_json(texts, index, MAX_TEXT_CHARS),
                }
                for index, text in enumerate((texts["completions"] or [])[:MAX_COMPLETIONS])
            ],
        }

    def problems(self, order: ProblemOrder, prefix: str, skip: int, limit: int) -> tuple[list[dict[str, Any]], int]:
        """Return one page of the problems with their solve rates, and the number of problems.

        Args:
            order: Largest rise or fall of the solve rate from a problem's first group to its latest one, or lowest or
                highest rate of the latest group.
            prefix: Beginning of the ids.
            skip: Problems before the page.
            limit: Most problems on the page.
        """
        rows = self.select(GroupQuery(problem=prefix, order="oldest"))
        rows = rows[(self.known[rows] > 0) & (self.problem[rows] >= 0)]
        if not len(rows):
            return [], 0
        rates = self.right[rows] / self.known[rows]
        codes, first, inverse = np.unique(self.problem[rows], return_index=True, return_inverse=True)
        last = np.zeros(len(codes), dtype=np.intp)
        last[inverse] = np.arange(len(rows))  # NumPy keeps the last value of a repeated index
        count = np.bincount(inverse)
        change = rates[last] - rates[first]
        keys = {"gained": -change, "lost": change, "hardest": rates[last], "easiest": -rates[last]}[order]
        page = np.lexsort((-self.step[rows][last], keys))[skip : skip + limit]
        return [
            {
                "problem": safe_text(self.ids[codes[each]], MAX_ID_CHARS),
                "groups": int(count[each]),
                "first_step": int(self.step[rows][first[each]]),
                "last_step": int(self.step[rows][last[each]]),
                "first_rate": float(rates[first[each]]),
                "last_rate": float(rates[last[each]]),
                "rate": float(rates[inverse == each].mean()),
                "prompt": self._prompt_of(with_texts[0]) if len(with_texts := same[self.has_texts[same]]) else None,
            }
            for each in page
            for same in [rows[inverse == each]]
        ], len(codes)

    def _read(self, number: int, columns: Sequence[str], step: int | None = None) -> "pa.Table":
        return read_rollout_file(self._folder, self.files[number], columns, step)


class RolloutReader:
    """Reader of `rollouts/` that reads only files that are new or have changed."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._files: list[RolloutFile] = []
        self._parts: dict[RolloutFile, _FileRows] = {}
        self._is_incomplete = False
        """True if the storage failed while a file was read, so that it is read again."""
        self.index = RolloutIndex(folder, [], [])

    def refresh(self) -> bool:
        """Read new and changed files; return True if the groups or notes have changed.

        Raises OSError if the folder cannot be listed.
        """
        files = list_rollout_files(self._folder)
        if files == self._files and not self._is_incomplete:
            return False
        parts, notes, is_incomplete = {}, [], False
        for file in files:
            try:
                parts[file] = self._parts.get(file) or self._read(file)
            except DataError as error:
                is_incomplete |= isinstance(error.__cause__, OSError)
                notes.append(f"rollouts cannot be read: {error}")
        changed = files != self._files or notes != self.index.notes
        self._files, self._parts, self._is_incomplete = files, parts, is_incomplete
        if changed:
            self.index = RolloutIndex(self._folder, list(parts.values()), notes)
        return changed

    def _read(self, file: RolloutFile) -> _FileRows:
        import pyarrow.compute as pc

        names = groups_table([]).schema.names
        table = read_rollout_file(self._folder, file, [*names, "prompt"])
        return _FileRows(file, table.select(names), pc.utf8_slice_codeunits(table["prompt"], 0, PROMPT_CHARS))


def describe_tokens(
    tokens: Mapping[str, Any] | None, length: int | None, results: Sequence[Any] | None = None
) -> dict[str, Any] | None:
    """Return the tokens of one completion as JSON; None if none were recorded, or if their text holds a secret.

    Args:
        tokens: Entry of the column `tokens`.
        length: Tokens of the completion.
        results: (K,) True for tokens of tools' results, which the policy did not generate; None in a run without tools.
    """
    texts = [text or "" for text in (tokens or {}).get("texts") or ()][:MAX_TOKENS]
    if not tokens or not texts:
        return None
    whole = "".join(texts)
    if safe_text(whole, len(whole)) != make_visible(whole):  # a secret may span tokens, and cannot be masked in each
        return None
    learner = tokens["learner_logps"]
    head = tokens["head"] if isinstance(tokens["head"], int) else len(texts)
    return {
        "texts": [make_visible(text)[:200] for text in texts],
        "engine": _numbers(tokens["engine_logps"], len(texts)),
        "learner": _numbers(learner, len(texts)) if learner is not None else None,
        "ratio": _numbers(importance_ratios(tokens), len(texts)) if learner is not None else None,
        "masked": [bool(each) for each in (tokens["masked"] or [])[: len(texts)]],
        "head": head,
        "omitted": max(0, (length or 0) - len(texts)) if head < len(texts) else 0,
        **({} if results is None else {"result": [bool(each) for each in results[: len(texts)]]}),
    }


def _rows_with_message(messages: "pa.ChunkedArray", options: Mapping[str, Any]) -> NDArray[np.intp]:
    """Return the rows with a message whose content or tool's name matches.

    Args:
        messages: (rows,) lists of a completion's lists of messages.
        options: Arguments of `pyarrow.compute.match_substring`.
    """
    import pyarrow.compute as pc

    rows = pc.list_parent_indices(messages).to_numpy()
    completions = pc.list_flatten(messages)
    parents = rows[pc.list_parent_indices(completions).to_numpy()]
    flat = pc.list_flatten(completions)
    hits = np.zeros(len(flat), dtype=bool)
    for name in ("content", "name"):
        found = pc.match_substring(pc.struct_field(flat, name), **options).fill_null(False)
        hits |= found.to_numpy().astype(bool)
    return np.unique(parents[hits])


def _excerpt(value: str, text: str) -> str | None:
    """Return the first occurrence of `text` with its surroundings, secrets masked; None if there is none."""
    value = safe_text(value, MAX_TEXT_CHARS)
    at = value.lower().find(text.lower())
    if at < 0:
        return None
    begin = max(0, at - EXCERPT_CHARS // 2)
    end = at + len(text) + EXCERPT_CHARS // 2
    return f"{'…' if begin else ''}{value[begin:end]}{'…' if end < len(value) else ''}"


def _group_means(column: "pa.ChunkedArray") -> NDArray[np.float64]:
    """Return the mean of the known values of each list, (rows,); NaN where there is none."""
    import pyarrow.compute as pc

    sizes = pc.list_value_length(column).fill_null(0).to_numpy()
    values = pc.list_flatten(column).to_numpy(zero_copy_only=False).astype(float)
    rows = np.repeat(np.arange(len(column)), sizes)
    known = np.isfinite(values)
    counts = np.bincount(rows[known], minlength=len(column))
    sums = np.bincount(rows[known], weights=values[known], minlength=len(column))
    return np.divide(sums, counts, out=np.full(len(column), math.nan), where=counts > 0)


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def _number(value: Any) -> Any:
    """Convert a number or boolean for JSON: floats to 5 digits, NaN, infinities and other types to None."""
    if isinstance(value, float | np.floating):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value if isinstance(value, bool | int) else None


def _numbers(values: Sequence[Any], count: int) -> list[Any]:
    numbers = [_number(value) for value in values[:count]]
    return numbers + [None] * (count - len(numbers))
