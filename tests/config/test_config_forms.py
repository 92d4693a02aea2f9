"""The forms in which a configuration may come, and the error where it is in none of them: path, dict, JSON text,
base64.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import math
import sys
from collections import OrderedDict, UserDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError

# A block of a document about ZeRO-R: it has a comma behind the last key of a block.
TRAILING_COMMA = """{
  "train_batch_size": 16,
  "gradient_accumulation_steps": 1,
  "zero_optimization": {
    "stage": 1,
    "allgather_bucket_size": 5e8,
    "reduce_bucket_size": 5e8,
  },
  "zero_allow_untested_optimizer": true,
  "wall_clock_breakdown": false,
  "steps_per_print": 9999999999
}"""
# From transformers' document: the comma before the last key is missing.
MISSING_COMMA = """{
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": true
        },
        "allgather_partitions": true,
        "allgather_bucket_size": 5e8,
        "overlap_comm": true,
        "reduce_scatter": true,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": true
        "round_robin_gradients": true
    }
}"""
SMALL: dict[str, Any] = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "keep_fp32": ["n"]}


def message(source: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        ZeroConfig.load(source)
    text = str(raised.value)
    assert "\n" in text, "a remedy stands on a line of its own"
    return text


def test_the_snippet_with_a_trailing_comma_loads() -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(TRAILING_COMMA)
    config = ZeroConfig.load(TRAILING_COMMA).resolve()
    assert config.stage == 1 and config.zero.reduce_bucket_size == 500_000_000
    assert config.steps_per_print == 9_999_999_999


def test_the_snippet_without_a_comma_is_an_error_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "zero2.json"
    path.write_text(MISSING_COMMA)
    text = message(path)
    assert str(path) in text
    assert "line 13, column 37, at the key zero_optimization.contiguous_gradients: expected ',' or '}'" in text
    mended = MISSING_COMMA.replace('true\n        "round', 'true,\n        "round')
    assert ZeroConfig.load(mended).stage == 2


def forms(folder: Path) -> dict[str, Any]:
    """The same configuration in every form that there is."""
    text = json.dumps(SMALL)
    files = {
        "plain": text.encode(),
        "bom": b"\xef\xbb\xbf" + text.encode(),
        "crlf": json.dumps(SMALL, indent=1).replace("\n", "\r\n").encode(),
        "comments": f"// one\n# two\n/* three\n */ {text} // end".encode(),
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_bytes(content)
    (folder / "no suffix").write_text(text)
    return {
        **{name: folder / f"{name}.json" for name in files},
        "text of a path": str(folder / "no suffix"),
        "JSON": text,
        "JSON after white space": f"\n\t {text}\n",
        "JSON with a byte order mark": "\ufeff" + text,
        "JSON behind a comment": f"# {{ not this\n{text}",
        "URL-safe base64": base64.urlsafe_b64encode(text.encode()).decode(),
        "base64": base64.b64encode(text.encode()).decode(),
        "base64 of indented JSON": base64.urlsafe_b64encode(f"\n {text}".encode()).decode(),
        "dict": copy.deepcopy(SMALL),
        "ordered": OrderedDict(copy.deepcopy(SMALL)),
        "read-only": MappingProxyType(copy.deepcopy(SMALL)),
        "mapping": UserDict(copy.deepcopy(SMALL)),
        "loaded": ZeroConfig.load(SMALL),
    }


def test_all_forms_say_the_same(tmp_path: Path) -> None:
    want = ZeroConfig.load(SMALL).resolve(world_size=2)
    for name, source in forms(tmp_path).items():
        got = ZeroConfig.load(source)
        assert got.resolve(world_size=2).settings == want.settings, name
        assert got.raw == SMALL, name


def test_base64_of_every_alphabet() -> None:
    """The letters in which the two alphabets differ are in it."""
    text = json.dumps({"keep_fp32": ["\u00ff\u00fe???>>>~~~"]}, ensure_ascii=False)
    safe, plain = base64.urlsafe_b64encode(text.encode()).decode(), base64.b64encode(text.encode()).decode()
    assert safe != plain
    assert ZeroConfig.load(safe).resolve().keep_fp32 == ZeroConfig.load(plain).resolve().keep_fp32 == (text[16:-3],)


def test_nothing_of_the_users_dict_is_changed_or_kept(tmp_path: Path) -> None:
    given = copy.deepcopy(SMALL)
    config = ZeroConfig.load(given)
    config.raw["zero_optimization"]["stage"] = 0
    config.get("zero_optimization")["stage"] = 0
    config.resolve(world_size=3).to_dict()["zero_optimization"]["stage"] = 0
    config.resolve(world_size=3).raw["zero_optimization"].clear()
    assert given == SMALL and config.stage == 2
    given["zero_optimization"]["offload_optimizer"]["device"] = "tape"
    assert config.resolve().zero.offload_optimizer.device == "cpu"


def test_duplicate_keys_are_refused_at_any_depth_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    path.write_text(
        '{"zero_optimization": {\n "stage": 3,\n "offload_param": {"device": "cpu",\n  "device": "nvme"}}}'
    )
    text = message(path)
    assert "zero_optimization.offload_param.device stands twice, at line 3 and at line 4" in text
    encoded = base64.urlsafe_b64encode(b'{"bf16": {}, "bf16": {}}').decode()
    assert "bf16 stands twice, at line 1 and at line 1" in message(encoded)


WRONG = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\t\n", "is empty"),
    "comments only": (b"// nothing\n# here\n", "is empty"),
    "byte order mark only": (b"\xef\xbb\xbf", "is empty"),
    "binary": (bytes(range(256)) * 8, "is not text in UTF-8"),
    "UTF-16": ("{}".encode("utf-16"), "is not text in UTF-8"),
    "Latin-1": (b'{"a": "\xe9"}', "is not text in UTF-8"),
    "list": (b"[{}]", "not an object"),
    "text": (b'"zero3"', "not an object"),
    "number": (b"3", "not an object"),
    "null": (b"null", "not an object"),
    "YAML": (b"zero_optimization:\n  stage: 3\n", "is not JSON: line 1, column 1: expected a value, found"),
    "Python": (
        b'{"bf16": {"enabled": True}}',
        "at the key bf16.enabled: expected a value, found 'True' (JSON writes true)",
    ),
    "None": (b'{"optimizer": None}', "JSON writes null"),
    "cut off": (b'{"bf16": {"enabled": true', "expected ',' or '}' after the value, found the end of the text"),
    "two documents": (b"{}\n{}", "line 2, column 1: expected the end of the text"),
    "open comment": (b"{} /* and so on", "expected the end of the text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_configuration_is_said_in_one_sentence(name: str, tmp_path: Path) -> None:
    content, expected = WRONG[name]
    path = tmp_path / "zero.json"
    path.write_bytes(content)
    text = message(path)
    assert expected in text and str(path) in text


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text("{}")
    assert "cannot be read: Is a directory" in message(tmp_path)
    assert "The folder has zero3.json" in message(tmp_path / "zero_3.json")
    assert "cannot be read" in message("zero\0.json")
    assert "cannot be read" in message("bm90IGpzb24=")  # base64, but of something else
    assert "cannot be read" in message("x" * 5000)
    locked = tmp_path / "locked.json"
    locked.symlink_to(locked)
    assert "cannot be read" in message(locked)
    assert "is empty" in message("")
    assert "is empty" in message("  # only a comment")
    for source in (3, None, ["zero3.json"], b"{}"):
        assert f"of type {type(source).__name__} was given" in message(source)


def test_comments_and_trailing_commas_are_read_over() -> None:
    config = ZeroConfig.load(
        """# comment
        {
          "zero_optimization": {"stage": 2, /* block */ "reduce_bucket_size": 5e8,},  // trailing comma
          "keep_fp32": ["a//b", "c#d",], # not comments inside texts
          "_comment": "ignored",
        }"""
    ).resolve()
    assert config.stage == 2 and config.keep_fp32 == ("a//b", "c#d")


# (text, what the message must hold)
BAD_JSON = [
    ('{"a": 1', "line 1, column 8"),
    ("{'a': 1}", "line 1, column 2: expected a key in double quotes"),
    ('{\n "zero_optimization": {"stage": 2\n  "overlap_comm": true}}', "line 2, column 34, at the key zero_opt"),
    ('{"train_batch_size": BATCH}', "at the key train_batch_size: expected a value, found 'BATCH'"),
    ('{"gradient_clipping": NaN}', "found 'NaN'"),
    ('{"a": "x', "Unterminated"),
    ('{"a" 1}', "expected ':'"),
    ('{"a": 1} x', "expected the end of the text"),
    ('{"a": 01}', "expected"),
    ("[1]", "not an object"),
    ("[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("text", "expected"), BAD_JSON, ids=range(len(BAD_JSON)))
def test_bad_json_says_where(text: str, expected: str) -> None:
    assert expected in message(text)


def test_duplicate_keys_are_refused_with_both_lines() -> None:
    text = message('{"zero_optimization": {\n"stage": 2,\n"stage": 3},\n"bf16": {},\n"bf16": {}}')
    assert "zero_optimization.stage stands twice, at line 2 and at line 3" in text
    assert "bf16 stands twice, at line 4 and at line 5" in text


@pytest.mark.parametrize("value", [math.inf, "inf", "Infinity"])
def test_infinite_steps_between_lines_are_never(value: Any) -> None:
    """accelerate's plugin writes float("inf"); in JSON that is Infinity."""
    assert ZeroConfig.load({"steps_per_print": value}).resolve().steps_per_print == 0
    assert ZeroConfig.load(json.dumps({"steps_per_print": value})).resolve().steps_per_print == 0
    with pytest.raises(ConfigError, match="steps_per_print = -Infinity: expected an integer of at least 0"):
        ZeroConfig.load({"steps_per_print": -math.inf})


def test_a_resolved_configuration_is_the_mapping_that_was_given() -> None:
    """Programs written for DeepSpeed read it under engine.config."""
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "cpu"}},
    }
    resolved = ZeroConfig.load(given).resolve(world_size=3)
    assert resolved.get("zero_optimization", {}) == {
        "stage": 3,
        "reduce_bucket_size": 500_000_000,
        "offload_param": {"device": "cpu"},
    }
    assert resolved["train_batch_size"] == 6 and resolved["gradient_accumulation_steps"] == 1
    assert resolved.get("fp16", {}) == {} and "fp16" not in resolved and "bf16" in resolved
    assert set(resolved) == {*given, "train_batch_size"} and len(dict(resolved)) == 5
    assert resolved.stage == 3 and resolved.train_micro_batch_size_per_gpu == 2  # attributes go on
    again = ZeroConfig.load(resolved).resolve(world_size=3)
    assert dict(again) == dict(resolved)
    assert dataclasses.replace(resolved, train_batch_size=12)["train_batch_size"] == 12
    with pytest.raises(KeyError, match="optimizer"):
        resolved["optimizer"]


HJSON = """{
  # Hjson has no need of quotes and commas.
  train_micro_batch_size_per_gpu: 2
  zero_optimization: {
    stage: 3
    overlap_comm: true
  }
  optimizer: {
    type: AdamW
    params: {lr: 1e-3}
  }
}
"""


def test_a_file_in_hjson(tmp_path: Path) -> None:
    path = tmp_path / "zero3.hjson"
    path.write_text(HJSON)
    config = ZeroConfig.load(path)
    assert config.stage == 3 and config.get("optimizer") == {"type": "AdamW", "params": {"lr": 1e-3}}
    path.write_text(HJSON.replace("overlap_comm", "stage"))
    with pytest.raises(ConfigError, match=r"zero3\.hjson\) is not Hjson: stage stands twice"):
        ZeroConfig.load(path)
    path.write_text("{ stage: [")
    with pytest.raises(ConfigError, match=r"zero3\.hjson\) is not Hjson"):
        ZeroConfig.load(path)


def test_hjson_in_a_file_for_json(tmp_path: Path) -> None:
    """DeepSpeed reads every file as Hjson. Where the first key has quotes it is JSON, and mistakes are JSON's."""
    path = tmp_path / "zero3.json"
    path.write_text(HJSON)
    assert dict(ZeroConfig.load(path).raw) == dict(ZeroConfig.load(HJSON).raw)
    assert ZeroConfig.load(path).get("optimizer") == {"type": "AdamW", "params": {"lr": 1e-3}}
    path.write_text(HJSON.replace("overlap_comm", "stage"))
    with pytest.raises(ConfigError, match=r"zero3\.json\) is not Hjson: stage stands twice"):
        ZeroConfig.load(path)


def test_hjson_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "zero3.hjson"
    path.write_text(HJSON)
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigError, match="which is not installed: pip install hjson"):
        ZeroConfig.load(path)
