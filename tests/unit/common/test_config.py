"""Settings: where they come from, which wins, and how mistakes are told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

import pytest
from pydantic import Field, SecretStr, ValidationError, model_validator

from common.config import Flags, Loaded, Settings, load, load_or_exit
from common.errors import ConfigError


class OvenSettings(Settings):
    """The oven."""

    max_temperature: int = Field(200, ge=50, le=300, description="Hottest it may get, in degrees.")
    shelf_names: tuple[str, ...] = Field((), description="Names of the shelves.")
    mode: Literal["grill", "bake"] = Field("bake", description="How to heat.")
    fan: bool = Field(True, description="Turn the fan on.")
    recipe: Annotated[str | None, Flags(positional=True)] = Field(None, description="What to bake.")
    weights: dict[str, float] = Field(default_factory=dict, description="Weights.")


class DoorSettings(Settings):
    """The door."""

    lock_code: SecretStr | None = Field(None, description="Opens the door.")
    keys: tuple[SecretStr, ...] = Field((), description="Open it too.")
    bell_url: Annotated[str, Flags(flags=("--bell",), variables=("BELL_URL",))] = Field("x://h", description="Bell.")
    open_s: float = Field(1.0, gt=0, description="How long it stays open.")
    close_s: float = Field(2.0, gt=0, description="How long it stays closed.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.close_s < self.open_s:
            raise ValueError(f"close_s ({self.close_s:g}) must be at least open_s ({self.open_s:g})")
        return self


def read(*argv: str, environ: Mapping[str, str] | None = None) -> Loaded:
    return load([OvenSettings, DoorSettings], argv, environ=environ or {}, prog="oven")


def mistakes(*argv: str, environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(*argv, environ=environ)
    return caught.value.message.splitlines()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "oven.toml"
    path.write_text('max_temperature = 100\n[oven]\nmode = "grill"\n[door]\nopen_s = 0.5\n', encoding="utf-8")
    return path


class TestPrecedence:
    def test_defaults_hold_when_nothing_is_given(self) -> None:
        assert read()[OvenSettings] == OvenSettings()

    def test_the_file_wins_over_the_default_at_top_level_and_in_tables(self, file: Path) -> None:
        loaded = read("--config", str(file))
        assert (loaded[OvenSettings].max_temperature, loaded[OvenSettings].mode) == (100, "grill")
        assert loaded[DoorSettings].open_s == 0.5

    def test_a_variable_wins_over_the_file_and_a_flag_over_the_variable(self, file: Path) -> None:
        environ = {"HEADRACE_CONFIG": str(file), "HEADRACE_MAX_TEMPERATURE": "110", "HEADRACE_MODE": "bake"}
        loaded = read("--max-temperature", "120", environ=environ)
        assert (loaded[OvenSettings].max_temperature, loaded[OvenSettings].mode) == (120, "bake")

    def test_an_empty_variable_counts_as_not_set(self) -> None:
        assert read(environ={"HEADRACE_MAX_TEMPERATURE": ""})[OvenSettings].max_temperature == 200

    def test_other_names_of_a_field_are_read(self) -> None:
        assert read("--bell", "a://b")[DoorSettings].bell_url == "a://b"
        assert read(environ={"BELL_URL": "c://d"})[DoorSettings].bell_url == "c://d"
        both = {"BELL_URL": "c://d", "HEADRACE_BELL_URL": "e://f"}
        assert read(environ=both)[DoorSettings].bell_url == "e://f"

    def test_settings_of_headrace_s_other_processes_are_left_to_them(self, tmp_path: Path) -> None:
        path = tmp_path / "shared.toml"
        path.write_text("[scheduler]\nmax_num_seqs = 3\n", encoding="utf-8")
        read("--config", str(path), environ={"HEADRACE_MAX_NUM_SEQS": "3"})


class TestForms:
    @pytest.mark.parametrize(
        ("text", "items"), [("a", ("a",)), ("a, b", ("a", "b")), ('["a,b", "c"]', ("a,b", "c")), (",", ("",))]
    )
    def test_a_list_is_read_by_one_rule_from_every_source(
        self, tmp_path: Path, text: str, items: tuple[str, ...]
    ) -> None:
        path = tmp_path / "oven.toml"
        path.write_text(f"shelf_names = '{text}'\n[door]\nkeys = '{text}'\n", encoding="utf-8")
        variables = {"HEADRACE_SHELF_NAMES": text, "HEADRACE_KEYS": text}
        for loaded in (
            read("--shelf-names", text, "--keys", text), read(environ=variables), read("--config", str(path))
        ):  # fmt: skip
            assert loaded[OvenSettings].shelf_names == items
            assert tuple(key.get_secret_value() for key in loaded[DoorSettings].keys) == items

    def test_lists_may_be_repeated_flags_and_arrays_of_the_file(self, tmp_path: Path) -> None:
        repeated = read("--shelf-names", "a", "--shelf-names", "b,c", "--shelf-names", '["d,e"]')
        assert repeated[OvenSettings].shelf_names == ("a", "b", "c", "d,e")
        path = tmp_path / "oven.toml"
        path.write_text('shelf_names = ["a", "b,c"]\n', encoding="utf-8")
        assert read("--config", str(path))[OvenSettings].shelf_names == ("a", "b,c")
        assert "not JSON" in mistakes("--shelf-names", '["a')[0]

    @pytest.mark.parametrize(("argv", "expected"), [((), True), (("--no-fan",), False), (("--fan",), True)])
    def test_booleans_are_on_off_flags(self, argv: tuple[str, ...], expected: bool) -> None:
        assert read(*argv)[OvenSettings].fan is expected

    def test_the_bare_argument_and_its_flag_are_the_same_setting(self) -> None:
        assert read("cake")[OvenSettings].recipe == "cake"
        assert read("--recipe", "cake")[OvenSettings].recipe == "cake"
        assert mistakes("cake", "--recipe", "bread") == [
            "recipe: given twice, as argument 'cake' and as --recipe 'bread'"
        ]

    def test_objects_are_json(self) -> None:
        assert read("--weights", '{"a": 2}')[OvenSettings].weights == {"a": 2.0}
        assert "not JSON" in mistakes("--weights", "{a: 2}")[0]

    def test_settings_cannot_be_changed_later(self) -> None:
        with pytest.raises(ValidationError):
            read()[OvenSettings].mode = "grill"  # type: ignore[misc]


class TestMistakes:
    def test_all_mistakes_of_all_sources_are_reported_together(self, tmp_path: Path) -> None:
        path = tmp_path / "oven.toml"
        path.write_text('colour = 1\n[oven]\nfan = "perhaps"\nsize = 2\n', encoding="utf-8")
        found = mistakes(
            "--max-temperature", "999", "--mod", "grill", "--config", str(path),
            environ={"HEADRACE_OPEN_S": "x", "HEADRACE_MODEE": "bake", "PATH": "/bin"},
        )  # fmt: skip
        assert found == [
            "--mod: unknown option (did you mean --mode?)",
            "HEADRACE_MODEE: unknown variable (did you mean HEADRACE_MODE?)",
            f"{path}: colour: unknown key",
            f"{path}: [oven] size: unknown key",
            "max_temperature: should be less than or equal to 300, got '999' (--max-temperature)",
            f"fan: should be a valid boolean, unable to interpret input, got 'perhaps' ({path}: [oven] fan)",
            "open_s: should be a valid number, unable to parse string as a number, got 'x' (HEADRACE_OPEN_S)",
        ]

    def test_a_rule_over_several_settings_names_them(self) -> None:
        assert mistakes("--open-s", "3") == ["[door]: close_s (2) must be at least open_s (3)"]

    def test_a_key_in_the_wrong_table_or_twice_is_reported(self, tmp_path: Path) -> None:
        path = tmp_path / "oven.toml"
        path.write_text("mode = 'bake'\n[door]\nfan = true\n[oven]\nmode = 'bake'\n", encoding="utf-8")
        assert mistakes("--config", str(path)) == [
            f"{path}: [door] fan: unknown key (did you mean fan?)",
            f"{path}: [oven] mode: given twice in the file",
        ]

    @pytest.mark.parametrize(("content", "reason"), [("a = ", "Invalid value"), (None, "No such file or directory")])
    def test_a_file_that_cannot_be_read_is_named(self, tmp_path: Path, content: str | None, reason: str) -> None:
        path = tmp_path / "oven.toml"
        if content is not None:
            path.write_text(content, encoding="utf-8")
        (line,) = mistakes("--config", str(path))
        assert line.startswith(f"{path}: cannot be read: {reason}")

    def test_secrets_and_passwords_are_not_echoed(self) -> None:
        everything = "\n".join(
            [
                *mistakes("--keys", "hush1", "--open-s", "-1", "--lock-codes", "hush2", "--fan=hush3"),
                *mistakes("--open-s", "-1", environ={"HEADRACE_KEYS": "[hush4"}),
                *mistakes("--mode", "x://me:hush5@host"),
                *mistakes("--mode", "x://host/?db=1&password=hush8"),
                str(read("--lock-code", "hush6", "--bell", "x://me:hush7@host").given()),
            ]
        )
        assert "hush" not in everything.replace("ignored explicit argument 'hush3'", "")

    def test_an_entry_point_exits_with_2_and_one_line_a_mistake(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            load_or_exit([OvenSettings], ["--mode", "fry", "--max-temperature", "1"], prog="oven")
        assert caught.value.code == 2
        assert capsys.readouterr().err.splitlines() == [
            "oven: max_temperature: should be greater than or equal to 50, got '1' (--max-temperature)",
            "oven: mode: should be 'grill' or 'bake', got 'fry' (--mode)",
        ]


class TestShowing:
    def test_help_lists_every_setting_in_its_group_with_default_and_variable(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            read("--help")
        text = capsys.readouterr().out
        assert caught.value.code == 0
        oven, door = text.split("The door:")
        assert "The oven:" in oven
        assert "--max-temperature int" in oven
        assert "[200] [HEADRACE_MAX_TEMPERATURE]" in " ".join(oven.split())
        assert "--no-fan" in oven
        assert "--lock-code secret" in door

    def test_help_is_plain_text_and_shows_what_is_required_without_brackets(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class BakingSettings(Settings):
            """What is baked."""

            baked_cake: Annotated[str, Flags(("--cake",), positional=True)] = Field(description="Name of the cake.")
            shop: Annotated[str, Flags(positional=True)] = Field("", description="Where it is sold.")
            code: SecretStr = Field(SecretStr(""), description="Opens the shop.")
            size: Literal["", "S", "L"] = Field("", description="Size.")

        with pytest.raises(SystemExit):
            load([BakingSettings], ["--help"], environ={}, prog="bake", description="``bake CAKE``: bakes it.")
        text = capsys.readouterr().out
        assert text.startswith("usage: bake CAKE [SHOP] [options]\n\nbake CAKE: bakes it.\n")
        assert "[none] [HEADRACE_CODE]" in " ".join(text.split())
        assert "--size S|L" in text

    def test_a_child_process_gets_the_same_values_through_its_environment(self) -> None:
        loaded = read(
            "cake", "--no-fan", "--shelf-names", '["a,b"]', "--weights", '{"a": 2}', "--lock-code", "x", "--keys", "y"
        )
        environ = loaded.environment()
        assert load([OvenSettings, DoorSettings], environ=environ).groups == loaded.groups
        assert set(loaded.environment(DoorSettings)) == {"HEADRACE_LOCK_CODE", "HEADRACE_KEYS"}

    def test_what_was_given_is_shown_for_the_start_up_log(self) -> None:
        shown = read("--mode", "grill", "--lock-code", "x").given()
        assert shown == {"mode": "grill", "lock_code": "***"}
