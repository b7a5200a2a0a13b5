"""Readers: every usual shape and container, and rows in = rows out + named rejects."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import os
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from drafttrain.corpus.config import PromptSource
from drafttrain.corpus.readers import collect_prompts, read_conversations, read_prompts, write_prompts
from drafttrain.errors import DataError

OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "Good"},
    ]
}
SHAREGPT = {
    "id": "sg",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Yes"},
        {"from": "human", "value": "So?"},
        {"from": "gpt", "value": "Good"},
    ],
}
ALPACA = {"instruction": "Translate", "input": "你好", "output": "Hello"}
COMPLETION = {"prompt": "Hi", "completion": "Yes"}
CHAT_COMPLETION = {
    "prompt": [{"role": "user", "content": "Hi"}],
    "completion": [{"role": "assistant", "content": "Yes"}],
}
TEXT = {"text": "Hi"}
TURNS = {"question_id": 7, "category": "maths", "turns": ["Hi", "So?"]}


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "contents", "turns"),
    [
        (OPENAI, ["Be brief.", "Hi"], ["So?"]),
        (SHAREGPT, ["Be brief.", "Hi"], ["So?"]),
        (ALPACA, ["Translate\n\n你好"], []),
        (COMPLETION, ["Hi"], []),
        (CHAT_COMPLETION, ["Hi"], []),
        (TEXT, ["Hi"], []),
        (TURNS, ["Hi"], ["So?"]),
        ({"question": "Hi", "answer": "Yes"}, ["Hi"], []),
        ({"prompt": "Hi", "turns": ["So?"]}, ["Hi"], ["So?"]),
        ({"prompt": ["Hi", "So?"], "reference": ["x"]}, ["Hi"], ["So?"]),  # MT-bench as it is published
        ("Hi", ["Hi"], []),
    ],
)
def test_prompts_of_every_shape(tmp_path: Path, row: Any, contents: list[str], turns: list[str]) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    (prompt,) = read_prompts(PromptSource(source=str(path))).items
    assert [message["content"] for message in prompt.messages] == contents
    assert prompt.messages[-1]["role"] == "user"
    assert prompt.turns == turns


@pytest.mark.parametrize("row", [OPENAI, SHAREGPT, ALPACA, COMPLETION, CHAT_COMPLETION])
def test_given_answers_are_kept_for_conversations(tmp_path: Path, row: dict[str, Any]) -> None:
    source = PromptSource(source=jsonl(tmp_path / "rows.jsonl", [row]))
    (conversation,) = read_conversations(source).items
    assert conversation.messages[-1]["role"] == "assistant"
    assert {message["role"] for message in conversation.messages} <= {"system", "user", "assistant"}


_PLAIN = ["jsonl", "json", "csv", "tsv", "parquet", "folder", "saved", "txt"]


@pytest.mark.parametrize("kind", [*_PLAIN, "jsonl.gz", "json.gz", "csv.gz", "txt.gz"])
def test_containers(tmp_path: Path, kind: str) -> None:
    kind, _, packed = kind.partition(".")
    rows = [{"prompt": f'Question {n}, "quoted"\nand 你好', "completion": "Yes"} for n in range(3)]
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        jsonl(path, rows)
    elif kind == "json":
        path.write_text(json.dumps({"data": rows}))
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "completion"], delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "txt":
        path.write_text("".join(row["prompt"].replace("\n", " ") + "\n\n" for row in rows))
    elif kind == "folder":
        path.mkdir()
        for number, row in enumerate(rows):
            jsonl(path / f"{number}.jsonl", [row])
    else:
        datasets = pytest.importorskip("datasets")
        if kind == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(str(path))
        else:
            datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(path))
    if packed:
        path = path.with_name(path.name + ".GZ")
        path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
    result = read_prompts(PromptSource(source=str(path)))
    expected = [row["prompt"].replace("\n", " ") if kind == "txt" else row["prompt"] for row in rows]
    assert [prompt.messages[0]["content"] for prompt in result.items] == expected
    assert len({prompt.id for prompt in result.items}) == 3


@pytest.mark.parametrize("row", [OPENAI, SHAREGPT, {"turns": ["Hi", "So?"]}, {"prompt": "Hi", "tags": ["a"]}])
def test_a_json_file_may_hold_a_single_row(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "row.json"
    read = []
    for value in (row, [row], {"conversations": [row]}):
        path.write_text(json.dumps(value))
        read.append([prompt.to_json() for prompt in read_prompts(PromptSource(source=str(path))).items])
    assert len(read[0]) == 1 and read[0] == read[1] == read[2]


def test_a_json_file_may_hold_splits(tmp_path: Path) -> None:
    path = tmp_path / "splits.json"
    path.write_text(json.dumps({"version": 1, "train": [{"prompt": "Hi"}], "test": [{"prompt": "So?"}]}))
    for split, text in (("train", "Hi"), ("test", "So?")):
        (prompt,) = read_prompts(PromptSource(source=str(path), split=split)).items
        assert prompt.messages[0]["content"] == text
    with pytest.raises(DataError, match="it has: version, train, test"):
        read_prompts(PromptSource(source=str(path), split="validation"))


def test_messages_as_json_text_in_a_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["messages", "extra"], [json.dumps(OPENAI["messages"]), ""]])
    assert len(read_conversations(PromptSource(source=str(path))).items[0].messages) == 5


def test_no_row_vanishes(tmp_path: Path) -> None:
    """Extra columns, `tools: [[]]`, None content and junk: each row is an item or a reject with a reason."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    rows: list[Any] = [
        {**OPENAI, "extra": 1, "tools": [[]], "other": None},
        {"messages": [{"role": "user", "content": "Hi", "name": None}, call, {"role": "tool", "content": "4"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "wizard", "content": "Hi"}]},
        {"messages": [{"role": "assistant", "content": "Hi"}]},
        {"messages": [{"from": "gpt", "value": "Hi"}, {"from": "human", "value": "Yes"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "part"}]}]},
        {"messages": []},
        {"instruction": " ", "output": "x"},
        {"unknown": "column"},
        [1, 2],
        "{broken",
        {"prompt": "half \ud83d of a smiley", "id": "\ud83d"},
        {"messages": '[{"role": "user", "content": "half \\ud83d of a smiley"}]'},
    ]
    path = jsonl(tmp_path / "rows.jsonl", [row if isinstance(row, str) else json.dumps(row) for row in rows])
    result = read_prompts(PromptSource(source=path))
    assert len(result.items) + len(result.rejects) == len(rows)
    first, tools, parts = result.items
    assert first.tools == [] and first.turns == ["So?"]
    assert [message["role"] for message in tools.messages] == ["user", "assistant", "tool"]
    assert parts.messages[0]["content"] == "part"
    assert [reject.where.rsplit(":", 1)[1] for reject in result.rejects] == [
        str(n) for n in (3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15)
    ]
    reasons = [reject.reason for reject in result.rejects]
    for reason, words in zip(
        reasons,
        [
            "message 1 (user) has no content",
            "unknown role 'wizard'",
            "no user turn",
            "begins with a turn of the assistant",
            "content other than text",
            "no messages",
            "empty user turn",
            "none of the known columns (it has: unknown)",
            "a row is an object",
            "not valid JSON",
            r"half of a surrogate pair, '\ud83d'",
            "half of a surrogate pair",
        ],
        strict=True,
    ):
        assert words in reason


@pytest.mark.parametrize("read", [read_prompts, read_conversations])
def test_no_row_of_a_table_vanishes(tmp_path: Path, read: Any) -> None:
    """A table gives each row every key of all rows, None where it has none."""
    datasets = pytest.importorskip("datasets")
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    dialogues: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}],
        [
            {"role": "user", "content": "Add"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4", "name": "f"},
            {"role": "assistant", "content": "It is 4."},
        ],
        [{"role": "user", "content": None}, {"role": "assistant", "content": "Yes"}],
    ]
    rows = [
        {"messages": messages, "tools": [[]], "score": score}
        for messages, score in zip(dialogues, (1.0, None, 2.0), strict=True)
    ]
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    result = read(PromptSource(source=str(path)))
    assert [reject.reason for reject in result.rejects] == ["message 1 (user) has no content"]
    assert len(result.items) == 2 and all(item.tools == [] for item in result.items)
    assert result.items[1].messages[1]["tool_calls"][0]["function"]["name"] == "f"
    assert all(None not in message.values() for item in result.items for message in item.messages)


def test_values_that_json_lacks(tmp_path: Path) -> None:
    """Times in each message, as WildChat has them; decimals; bytes that are text, and bytes that are none."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    time = datetime(2024, 1, 2, tzinfo=UTC)
    said = [{"role": "user", "content": "Hi", "at": time}, {"role": "assistant", "content": "Yes", "at": time}]
    rows = [
        {"conversation": said, "meta": {"price": Decimal("1.5")}, "image": b"\xff\xd8"},
        {"prompt": b"caf\xc3\xa9", "id": time},
        {"prompt": b"\xff\xfe"},
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(
        arrow.Table.from_pylist(
            rows,
            schema=arrow.schema(
                [
                    (
                        "conversation",
                        arrow.list_(
                            arrow.struct(
                                {
                                    "role": arrow.string(),
                                    "content": arrow.string(),
                                    "at": arrow.timestamp("us", tz="UTC"),
                                }
                            )
                        ),
                    ),
                    ("meta", arrow.struct({"price": arrow.decimal128(5, 2)})),
                    ("image", arrow.binary()),
                    ("prompt", arrow.binary()),
                    ("id", arrow.timestamp("us", tz="UTC")),
                ]
            ),
        ),
        path,
    )
    result = read_prompts(PromptSource(source=str(path)))
    first, second = result.items
    assert first.messages == [{"role": "user", "content": "Hi", "at": "2024-01-02 00:00:00+00:00"}]
    assert first.meta["price"] == "1.50"
    assert second.messages[0]["content"] == "café" and second.id.startswith("2024-01-02")
    assert [reject.where.rsplit(":", 1)[1] for reject in result.rejects] == ["3"]
    assert len(read_conversations(PromptSource(source=str(path))).items[0].messages) == 2


def test_what_is_no_text_is_no_prompt_and_no_answer(tmp_path: Path) -> None:
    rows = [
        {"prompt": {"text": "Hi"}},
        {"messages": [{"role": "user", "content": {"text": "Hi"}}]},
        {"instruction": ["a", "b"]},
        {"question": "Hi", "answer": {"text": ["Yes"], "start": [1]}},
    ]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    result = read_prompts(PromptSource(source=path))
    assert [prompt.messages for prompt in result.items] == [[{"role": "user", "content": "Hi"}]]
    assert [reject.reason for reject in result.rejects] == [
        "has an object where a text is read",
        "has an object where a text is read",
        "has a list where a text is read",
    ]
    with pytest.raises(DataError, match=r"holds no usable row \(4 refused"):
        read_conversations(PromptSource(source=path))


def test_json_that_is_nested_too_deeply_is_one_reject(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    path = jsonl(tmp_path / "rows.jsonl", [TEXT, f'{{"prompt": {deep}}}', json.dumps({"messages": deep})])
    result = read_prompts(PromptSource(source=path))
    assert len(result.items) + len(result.rejects) == 3
    assert result.rejects[0].reason == "is not valid JSON: nested too deeply"
    (tmp_path / "rows.json").write_text(deep)
    with pytest.raises(DataError, match="nested too deeply"):
        read_prompts(PromptSource(source=str(tmp_path / "rows.json")))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt"])
def test_text_of_other_encodings(tmp_path: Path, kind: str) -> None:
    """A byte order mark is no part of the first prompt; UTF-16 is said once, not line by line."""
    head, row = (
        ("prompt\r\n", "Hi\r\n") if kind == "csv" else ("", '{"text": "Hi"}\r\n' if kind == "jsonl" else "Hi\r\n")
    )
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(b"\xef\xbb\xbf" + (head + row * 2).encode())
    prompts = read_prompts(PromptSource(source=str(path))).items
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["Hi", "Hi"]
    path.write_bytes((head + row * 2).encode("utf-16"))
    with pytest.raises(DataError, match="UTF-8") as caught:
        read_prompts(PromptSource(source=str(path)))
    assert caught.value.where == str(path) and caught.value.remedy == "convert it to UTF-8"


def test_a_cell_may_be_long(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt\n" + "long " * 100_000 + "\n")
    assert len(read_prompts(PromptSource(source=str(path))).items) == 1


def test_links_in_a_folder(tmp_path: Path) -> None:
    """Linked folders are read, each once, loops end, and a link to nothing is an error that names it."""
    folder, elsewhere = tmp_path / "rows", tmp_path / "elsewhere"
    (folder / "below").mkdir(parents=True)
    (folder / "a.jsonl").mkdir()
    elsewhere.mkdir()
    jsonl(elsewhere / "b.JSONL", [TEXT])
    jsonl(folder / "below" / "c.jsonl", [TEXT])
    (folder / "linked").symlink_to(elsewhere)
    (folder / "below" / "loop").symlink_to(folder)
    assert len(read_prompts(PromptSource(source=str(folder))).items) == 2
    for name, goal in (("gone.jsonl", "nowhere"), ("self.jsonl", "self.jsonl")):
        (folder / name).symlink_to(goal)
        with pytest.raises(DataError, match="cannot be read: ") as caught:
            read_prompts(PromptSource(source=str(folder)))
        assert caught.value.where == str(folder / name)
        (folder / name).unlink()


def test_packed_files_are_read_or_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(TEXT).encode()))
    for name in ("b.jsonl.zst", "below/c.json.xz", "d.parquet.gz", "README.md"):
        (tmp_path / name).write_bytes(b"(\xb5/\xfd")
    with caplog.at_level(logging.WARNING):
        (prompt,) = read_prompts(PromptSource(source=str(tmp_path))).items
    assert prompt.messages[0]["content"] == "Hi"
    (said,) = caplog.messages
    assert said == f"{tmp_path}: not read, being packed: b.jsonl.zst, below/c.json.xz, d.parquet.gz"
    (tmp_path / "a.jsonl.gz").unlink()
    with pytest.raises(DataError, match=r"no data file .*; not read, being packed: b\.jsonl\.zst.*\n  unpack"):
        read_prompts(PromptSource(source=str(tmp_path)))
    for name in ("b.jsonl.zst", "d.parquet.gz"):
        with pytest.raises(DataError, match=r"is packed in a way that is not read\n  unpack"):
            read_prompts(PromptSource(source=str(tmp_path / name)))
    with pytest.raises(DataError, match="no such file"):
        read_prompts(PromptSource(source="owner/rows.jsonl.zst"))


def test_a_damaged_gzip_file_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(json.dumps(TEXT).encode() * 100)
    for damaged in (b"no gzip", whole[:-9], whole[:20] + b"\xff" * 20):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot be read: ") as caught:
            read_prompts(PromptSource(source=str(path)))
        assert caught.value.where == str(path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        read_prompts(PromptSource(source=str(tmp_path / "pipe.jsonl")))
    with pytest.raises(DataError, match="no data file"):
        read_prompts(PromptSource(source=str(tmp_path)))


def test_a_quote_left_open_does_not_swallow_the_rows_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt\nfirst\n"second\nthird\n', encoding="utf-8")
    with pytest.raises(DataError, match="is not valid CSV: unexpected end of data"):
        read_prompts(PromptSource(source=str(path)))


def test_a_saved_data_set_that_is_damaged_is_one_error(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "dataset_info.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="no readable saved data set"):
        read_prompts(PromptSource(source=str(tmp_path)))


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / "rows.parquet"
    path.touch()
    with pytest.raises(DataError, match=rf"the package {package} is not installed\n  pip install 'drafttrain\[data\]'"):
        read_prompts(PromptSource(source=str(path) if package == "pyarrow" else "someone/something"))


def test_columns_can_be_renamed_and_a_system_message_added(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"frage": "Hi", "prompt": "wrong"}])
    (prompt,) = read_prompts(PromptSource(source=path, columns={"prompt": "frage"}, system="Be brief.")).items
    assert [message["content"] for message in prompt.messages] == ["Be brief.", "Hi"]
    with pytest.raises(DataError, match="no column 'nein'"):
        read_prompts(PromptSource(source=path, columns={"prompt": "nein"}))


def test_count_is_a_seeded_choice_in_order(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": f"number {n:03}"} for n in range(100)])
    chosen = read_prompts(PromptSource(source=path, count=10))
    texts = [prompt.messages[0]["content"] for prompt in chosen.items]
    assert len(texts) == 10 and texts == sorted(texts) and texts[-1] > "number 050"
    assert chosen.unused == 90
    assert chosen == read_prompts(PromptSource(source=path, count=10))
    assert chosen != read_prompts(PromptSource(source=path, count=10, seed=1))


def test_ids_are_unique_within_and_across_sources(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"id": "a", "text": "Hi there"}, {"id": "a", "text": "So?"}])
    result = collect_prompts([PromptSource(source=path)] * 2)
    assert len({prompt.id for prompt in result.items}) == 4
    path = jsonl(tmp_path / "same.jsonl", [{"id": 0, "text": "Hi"}] * 9 + [{"id": "0#2", "text": "Hi"}])
    ids = [prompt.id for prompt in read_prompts(PromptSource(source=path)).items]
    assert ids[:3] == ["0", "0#2", "0#3"] and len(set(ids)) == 10


def test_written_prompts_read_back_the_same(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [
        OPENAI,
        {**TURNS, "tools": tools},
        {"messages": [{"role": "user", "content": "😀"}], "meta": {"source": "x"}},
    ]
    prompts = read_prompts(PromptSource(source=jsonl(tmp_path / "rows.jsonl", rows))).items
    write_prompts(tmp_path / "set.jsonl", prompts)
    assert read_prompts(PromptSource(source=str(tmp_path / "set.jsonl"))).items == prompts


def test_missing_and_empty_sources_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_prompts(PromptSource(source=str(tmp_path / "none.jsonl")))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="no usable row"):
        read_prompts(PromptSource(source=str(tmp_path / "empty.jsonl")))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        read_prompts(PromptSource(source=str(tmp_path / "bad.json")))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 this is none")
    with pytest.raises(DataError, match="Parquet"):
        read_prompts(PromptSource(source=str(tmp_path / "bad.parquet")))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="no data file"):
        read_prompts(PromptSource(source=str(tmp_path / "folder")))


def test_a_name_without_network_is_one_clear_error() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match="neither a file nor a data set") as caught:
        read_prompts(PromptSource(source="no-such-owner/no-such-set"))
    assert caught.value.remedy is not None
