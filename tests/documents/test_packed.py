"""mw.Packed: documents of files as rows of tokens, the same in every process."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.documents import tokens
from meshwright.documents.fingerprints import fingerprint
from meshwright.documents.packing import best_fit
from meshwright.errors import DataError, ExtraError


def written(folder: Path, texts: list[str], name: str = "a.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts_of(count: int, most: int = 40) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choice("abcdefg ") for _ in range(rng.randint(1, most))) for _ in range(count)]


def documents(data: Any) -> list[bytes]:
    """The pieces of documents in all rows, read from their positions."""
    found = []
    for row in data:
        starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), data.length]
        for start, stop in pairwise(starts):
            labels, ids = row["labels"][start:stop], row["input_ids"][start:stop]
            assert labels[0] == -100
            assert row["position_ids"][start:stop].tolist() == list(range(stop - start))
            if stop == data.length and not ids.any():  # padding
                assert (labels == -100).all()
                continue
            assert torch.equal(labels[1:], ids[1:])
            found.append(bytes(ids.tolist()))
    return found


@pytest.mark.parametrize("count", [1, 3, 2500])
def test_best_fit_keeps_documents_whole(tmp_path: Path, count: int) -> None:
    texts = [text + "!" for text in texts_of(count)]  # two tokens at least
    data = mw.Packed([written(tmp_path, texts)], length=64, folder=tmp_path)
    assert sorted(documents(data)) == sorted(text.encode() for text in texts)
    assert data.tokens == sum(map(len, texts))
    if count == 2500:
        assert data.fill > 0.99


def test_cut_keeps_the_order_of_tokens_over_files(tmp_path: Path) -> None:
    texts = texts_of(50)
    files = [
        written(tmp_path, texts[:20]),
        written(tmp_path, texts[20:21], "b.jsonl"),
        written(tmp_path, texts[21:], "c.jsonl"),
    ]
    data = mw.Packed(files, length=16, fit="cut", folder=tmp_path)
    text = "".join(texts).encode()
    assert len(data) == -(-len(text) // 16)
    ids = torch.cat([row["input_ids"] for row in data])
    assert bytes(ids[: len(text)].tolist()) == text
    assert int(ids[len(text) :].sum()) == 0
    starts = {sum(map(len, texts[:i])) for i in range(50)}
    zeros = torch.cat([row["position_ids"] for row in data]) == 0
    assert {*zeros[: len(text)].nonzero().flatten().tolist()} == starts | {*range(0, len(text), 16)}


def test_long_documents_are_cut_first(tmp_path: Path) -> None:
    data = mw.Packed([written(tmp_path, ["a" * 37, "b" * 5])], length=16, folder=tmp_path)
    assert sorted(map(len, documents(data))) == [5, 5, 16, 16]


def test_best_fit_is_best_fit() -> None:
    assert list(best_fit([6, 5, 4, 3, 2], 10)) == [[0, 2], [1, 3, 4]]
    assert list(best_fit([10, 10], 10)) == [[0], [1]]


def test_text_files_are_one_document_and_ends_are_put(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo \xff")
    data = mw.Packed([tmp_path / "a.txt"], length=12, folder=tmp_path, end=256, documents=True)
    (row,) = data
    assert row["input_ids"].tolist() == [*b"one\ntwo \xff", 256, 0, 0]
    assert row["document_ids"].tolist() == [0] * 10 + [1] * 2
    assert data.largest == 256


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_tokens_are_made_once_and_named_by_what_they_are_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, ids = list[Any](), tokens.Tokenizer.ids
    monkeypatch.setattr(tokens.Tokenizer, "ids", lambda self, texts: calls.extend(texts) or ids(self, texts))
    path = written(tmp_path, ["a bb ccc", "dddd"])
    first = mw.Packed([path], words, length=4, folder=tmp_path)
    again = mw.Packed([path], words, length=4, folder=tmp_path)
    assert calls == ["a bb ccc", "dddd"]
    assert first.digest == again.digest
    assert first[0]["input_ids"].tolist() == again[0]["input_ids"].tolist() == [1, 2, 3, 4]
    written(tmp_path, ["a bb ccc", "ddddd"])
    other = mw.Packed([path], words, length=4, folder=tmp_path)
    assert other.digest != first.digest
    assert other[0]["input_ids"].tolist() == [1, 2, 3, 5]
    assert mw.Packed([path], length=4, folder=tmp_path).digest != other.digest
    held = pickle.loads(pickle.dumps(mw.Packed([path], length=4, folder=tmp_path)))
    assert bytes(held[0]["input_ids"].tolist()) == b"a bb"


class Table:
    """A tokenizer that is an object."""

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids, self.lock = ids, threading.Lock()

    def __call__(self, text: str) -> list[int]:
        return [self.ids[c] for c in text]

    def encode(self, text: str) -> list[int]:
        return self(text)


def constant(k: int, text: str) -> list[int]:
    return [k] * len(text)


IDS: dict[str, int] = {}


def from_global(text: str) -> list[int]:
    return [IDS[c] for c in text]


def from_closure(ids: dict[str, int]) -> Any:
    return lambda text: [ids[c] for c in text]


def cached(ids: torch.Tensor) -> Any:
    @functools.cache
    def one(c: str) -> int:
        return int(ids["abcd".index(c)])

    return lambda text: list(map(one, text))


@pytest.mark.parametrize(
    "of",
    [
        Table,
        lambda ids: Table(ids).encode,
        lambda ids: functools.partial(constant, ids["a"]),
        lambda ids: lambda text, k=ids["a"]: [k] * len(text),
        lambda ids: IDS.update(ids) or from_global,
        from_closure,
        lambda ids: (lambda inner: lambda text: inner(text))(Table(ids)),
        lambda ids: cached(torch.tensor([*ids.values()])),
    ],
)
def test_tokens_are_of_the_tokenizer_that_is_given(tmp_path: Path, of: Any) -> None:
    path = written(tmp_path, ["abcd"])
    for first in (1, 11, 1):
        ids = dict(zip("abcd", range(first, first + 4), strict=True))
        tokenizer = of(ids)
        data = mw.Packed([path], tokenizer, length=4, folder=tmp_path)
        assert data[0]["input_ids"].tolist() == tokenizer("abcd")
    assert len({path.name for path in tmp_path.glob("*.ids")}) == 2


@pytest.mark.processes
def test_fingerprints_are_those_of_other_processes() -> None:
    """Sets and hashes of strings have another order in each."""
    code = "from tests.documents.test_packed import *; from meshwright.documents.fingerprints import fingerprint as f; "
    code += "print(f(Table({'a': {'u', 'v', 'w'}})), f(cached(torch.arange(4))), f(words), f(len))"
    root = Path(__file__).parents[2]
    made = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{root / 'src'}:{root}"},
        ).stdout
        for seed in "12"
    }  # fmt: skip
    assert len(made) == 1
    with pytest.raises(DataError, match=r"generator cannot be read .*Give a function of plain values"):
        fingerprint(i for i in range(3))


def test_processes_share_files_out(tmp_path: Path) -> None:
    files = [written(tmp_path, texts_of(5), f"{i}.jsonl") for i in range(6)]
    made, barrier = [], threading.Barrier(3)

    def work() -> None:
        barrier.wait()
        made.append(mw.Packed(files, length=64, folder=tmp_path / "t").digest)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 3
    assert len({*made}) == 1
    left = sorted(path.suffix for path in (tmp_path / "t").iterdir())
    assert left == [".ends", ".ids", ".json", ".lock"]  # six files of the same text have one digest


def test_tokenizers_of_libraries(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 299}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = written(tmp_path, ["a b", "b x a"])
    rows = [mw.Packed([path], inner, length=5, folder=tmp_path)[0]["input_ids"].tolist()]
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="b")
    rows.append(mw.Packed([path], fast, length=7, folder=tmp_path)[0]["input_ids"].tolist())
    assert rows == [[1, 299, 0, 0, 1], [1, 299, 0, 1, 0, 1, 1]]


def test_the_loader_reads_packed_rows_the_same_on_every_mesh(tmp_path: Path) -> None:
    path, seen = written(tmp_path, texts_of(60)), []
    for size, workers in ((1, 0), (3, 0), (2, 2)):
        mesh = mw.Mesh({"dp": size})

        def fn(mesh: Any = mesh, workers: int = workers) -> Any:
            data = mw.Packed([path], length=32, folder=tmp_path)
            loader = mw.shard_dataloader(data, mesh, batch_size=5, shuffle=True, num_workers=workers)
            assert loader.state_dict()["data"] == data.digest
            return [{key: mw.unshard(value).tolist() for key, value in batch.items()} for batch in loader]

        seen.append(mw.simulate(fn, mesh)[0])
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_packed_loss_is_that_of_documents_one_by_one(tmp_path: Path, kind: str) -> None:
    """Positions that start again keep documents apart in models of transformers."""
    transformers = pytest.importorskip("transformers")
    from meshwright.verification.doubled import Doubled

    sizes: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "use_cache": False,
    }  # fmt: skip
    configs = {
        "qwen3": lambda: transformers.Qwen3Config(head_dim=8, **sizes),
        "mixtral": lambda: transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **sizes),
    }
    torch.manual_seed(0)
    with Doubled():
        config = configs[kind]()
        config._experts_implementation = "eager"  # grouped products are not computed in float64
        model = transformers.AutoModelForCausalLM.from_config(config).double()
        texts = texts_of(30)
        data = mw.Packed([written(tmp_path, texts)], length=64, folder=tmp_path)

        def summed(batch: dict[str, Any]) -> tuple[float, int]:
            count = int((batch["labels"][:, 1:] != -100).sum())
            return (float(model(**batch).loss) * count, count) if count else (0.0, 0)

        def batch_of(text: str) -> dict[str, Any]:
            ids = torch.tensor([list(text.encode())])
            return {"input_ids": ids, "labels": ids}

        packed = [summed({key: value[None] for key, value in row.items()}) for row in data]
        alone = [summed(batch_of(text)) for text in texts if len(text) > 1]
    assert sum(n for _, n in packed) == sum(n for _, n in alone)
    assert sum(x for x, _ in packed) == pytest.approx(sum(x for x, _ in alone), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text"\n', r"a.jsonl, line 2 is no JSON"),
        ("a.jsonl", '{"body": "a"}\n', r"line 1 has no text under 'text' \(keys 'body'\)"),
        ("a.jsonl", "\n\n", "has no tokens"),
        ("a.jsonl", '{"text": "ab\\ud800"}\n', r"no Unicode text, at 'ab\\\\ud800': mend or drop it"),
        ("a.txt", "", "is empty"),
        ("", "", "is a folder"),
        ("missing.txt", None, "no such file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if name and text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        mw.Packed([tmp_path / name], length=4, folder=tmp_path)


def test_parquet_and_arrow_are_rows_of_text(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [text + "!" for text in texts_of(300)]
    table = arrow.table({"id": list(range(300)), "body": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=64)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    with arrow.OSFile(str(tmp_path / "saved" / "a.arrow"), "wb") as out, arrow.ipc.new_stream(out, table.schema) as to:
        to.write_table(table, max_chunksize=50)
    want = mw.Packed([written(tmp_path, texts)], length=64, folder=tmp_path)
    for path in (tmp_path / "a.parquet", tmp_path / "saved" / "a.arrow"):
        data = mw.Packed([path], length=64, column="body", folder=tmp_path)
        assert len(data) == len(want)
        assert all(torch.equal(data[i]["input_ids"], want[i]["input_ids"]) for i in range(len(want)))
        with pytest.raises(DataError, match=r"has no column 'text' \(it has 'id', 'body'\). Pass column="):
            mw.Packed([path], length=64, folder=tmp_path)
        with pytest.raises(DataError, match=r"row 1: 'id' is 0, no text. Drop the row"):
            mw.Packed([path], length=64, column="id", folder=tmp_path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(DataError, match=rf"{path.name} is damaged, or no (Parquet|Arrow) file \("):
            mw.Packed([path], length=32, column="body", folder=tmp_path)
    with pytest.raises(DataError, match=r"saved is a folder: name the files in it, e.g. .*saved.\*\.arrow"):
        mw.Packed([tmp_path / "saved"], length=64, folder=tmp_path)


def test_parquet_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ExtraError, match=r"a.parquet needs pyarrow: pip install 'meshwright\[data\]'"):
        mw.Packed([tmp_path / "a.parquet"], length=4, folder=tmp_path)


def test_bad_arguments_and_a_damaged_folder(tmp_path: Path) -> None:
    path = written(tmp_path, ["abc", "de"])
    for options, message in (
        ({"length": 1}, "length=1"),
        ({"length": 4, "fit": "first"}, "fit='first'"),
    ):
        with pytest.raises(DataError, match=message):
            mw.Packed([path], folder=tmp_path, **options)
    with pytest.raises(DataError, match="list of file names"):
        mw.Packed(path, length=4)
    with pytest.raises(DataError, match="cannot be written"):
        mw.Packed([path], length=4, folder="/proc/none")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="no UTF-8"):
        mw.Packed([tmp_path / "b.txt"], list, length=4, folder=tmp_path)
    mw.Packed([path], length=4, folder=tmp_path)
    (ids,) = tmp_path.glob("*.ids")
    ids.write_bytes(b"ab")
    with pytest.raises(DataError, match=r"Delete .* to write it again"):
        mw.Packed([path], length=4, folder=tmp_path)[0]
