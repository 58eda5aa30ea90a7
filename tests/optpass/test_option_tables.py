"""Options that are tables: a word, a table or text from any layer give one frozen record; errors name the nearest."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from optpass.errors import ConfigError
from optpass.option_tables import TABLES, AttentionOptions
from optpass.options import Options, resolve

NOWHERE = Path("/")


def attention(value: Any) -> AttentionOptions:
    return resolve({"attention": value}, start=NOWHERE, environ={}).attention


def test_words_and_tables_say_the_same() -> None:
    assert resolve(start=NOWHERE, environ={}).attention == AttentionOptions()
    assert AttentionOptions().to_json() == {"mode": "auto", "dropout": "keep", "masked_rows": "exact"}
    for word in ("auto", "always", "off", "sdpa", "flex"):
        assert attention(word) == attention({"mode": word}) == AttentionOptions(mode=word)  # type: ignore[arg-type]
    assert attention({}) == AttentionOptions()
    assert attention({"dropout": "swap"}) == AttentionOptions(dropout="swap")
    kept = AttentionOptions(mode="flex", masked_rows="any")
    assert attention(kept) is kept and Options(attention=kept).attention is kept
    with pytest.raises(Exception, match="frozen"):
        kept.mode = "off"  # type: ignore[misc]


def test_every_choice_is_reached_by_every_layer(tmp_path: Path) -> None:
    keys = AttentionOptions.model_fields
    for words in itertools.product(*(AttentionOptions.choices(key) for key in keys)):
        table = dict(zip(keys, words, strict=True))
        inline = "{ " + ", ".join(f'{key} = "{word}"' for key, word in table.items()) + " }"
        file = tmp_path / "optpass.toml"
        file.write_text(f"attention = {inline}\n")
        found = [
            resolve({"attention": table}, start=NOWHERE, environ={}),
            resolve(start=tmp_path, environ={}),
            resolve(start=NOWHERE, cli={"attention": inline}, environ={}),
            resolve(start=NOWHERE, environ={"OPTPASS_ATTENTION": f" {inline} "}),
        ]
        assert [options.to_json()["attention"] for options in found] == [table] * 4
        assert json.loads(json.dumps(found[0].to_json()))["attention"] == table
        origins = ["options", str(file), "command line", "environment"]
        assert [options.where("attention").rpartition(":")[0] for options in found] == origins


def test_a_word_in_text_and_a_table_in_a_file(tmp_path: Path) -> None:
    assert resolve(start=NOWHERE, environ={"OPTPASS_ATTENTION": "always"}).attention.mode == "always"
    assert resolve(start=NOWHERE, cli={"attention": " sdpa "}, environ={}).attention.mode == "sdpa"
    (tmp_path / "pyproject.toml").write_text('[tool.optpass.attention]\nmasked_rows = "any"\n')
    options = resolve(start=tmp_path, cli={"attention": "off"}, environ={"OPTPASS_ATTENTION": "flex"})
    assert options.attention == AttentionOptions(masked_rows="any")  # the first layer wins as a whole


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("alwys", "='alwys' is no choice here; did you mean 'always'?"),
        ("Always", "='Always' is no choice here; did you mean 'always'?"),
        ("", "='' is no choice here; valid: auto, always, off, sdpa, flex"),
        ({"dropuot": "swap"}, ": unknown key 'dropuot' (= 'swap'); did you mean 'dropout'?"),
        ({3: 1}, ": unknown key 3 (= 1); valid: mode, dropout, masked_rows"),
        ({"mode": "auto", "dropout": "swp"}, ".dropout='swp' is no choice here; did you mean 'swap'?"),
        ({"masked_rows": True}, ".masked_rows=True is no choice here; valid: exact, any"),
        (True, "=True (bool) is neither a word ('auto', 'always', 'off', 'sdpa', 'flex') nor a table"),
        (None, "=None (NoneType) is neither a word"),
        (["auto"], "=['auto'] (list) is neither a word"),
    ],
)
def test_errors_name_place_value_and_nearest(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        attention(value)
    assert str(caught.value).startswith("options: attention" + message) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError) as direct:
        Options(attention=value)
    assert str(direct.value).startswith("attention" + message)


def test_errors_in_text_name_their_layer(tmp_path: Path) -> None:
    def message(text: str) -> str:
        with pytest.raises(ConfigError) as caught:  # in a layer that loses, too
            resolve({"attention": "auto"}, start=NOWHERE, environ={"OPTPASS_ATTENTION": text})
        return str(caught.value)

    start = "environment: OPTPASS_ATTENTION"
    assert message("alwys") == f"{start}='alwys' is no choice here; did you mean 'always'?"
    assert message("{ mode = 3 }") == f"{start}.mode=3 is no choice here; valid: auto, always, off, sdpa, flex"
    assert message("{ mode") == f"{start}='{{ mode' is not an inline table; write {{ mode = \"always\" }}"
    (tmp_path / "optpass.toml").write_text("attention = { mode = 'flx' }\n")
    with pytest.raises(ConfigError, match=r"optpass\.toml: attention\.mode='flx' is no choice here; did you mean"):
        resolve(start=tmp_path, environ={})


def test_every_table_is_an_option_and_described() -> None:
    for key, table in TABLES.items():
        assert Options.model_fields[key].annotation is table
        assert all(field.description and table.choices(name) for name, field in table.model_fields.items())
