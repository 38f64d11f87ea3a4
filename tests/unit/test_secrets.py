"""Keys and passwords: refused in a config's log section, and left out of what loggers are sent; nothing else is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.load import load, validate
from lockstep.config.schema import RunSettings
from lockstep.config.secrets import LEFT_OUT, is_secret, redacted
from lockstep.errors import ConfigError

SECRETS = [
    "api_key", "apiKey", "API_KEY", "wandb_api_key", "aws_secret_access_key", "access_key", "private_key", "token",
    "hf_token", "access_token", "HF_TOKEN", "MLFLOW_TRACKING_TOKEN", "password", "db_password", "secret",
    "client_secret", "credentials", "passphrase", "LOCKSTEP_SECRET",
]  # fmt: skip
HARMLESS = [
    "key", "label_key", "key_dim", "num_keys", "sort_key", "max_tokens", "tokens", "token_count", "pad_token",
    "eos_token", "cls_token", "tokenizer", "keys", "lr", "secretary", "passwords_file", "", "123",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_sounds_alike_is_none(name: str) -> None:
    assert not is_secret(name)


def test_a_config_is_sent_without_its_secrets_and_with_all_the_rest() -> None:
    config = {
        "task": {
            "type": "a:B",
            "api_key": "s3cret",
            "pad_token": "<pad>",
            "key": "image",
            "max_tokens": 5,
            "token": 17,
        },
        "data": [{"password": 12345, "url": "https://user:pass@host/x?a=1"}],
        "other": {"use_auth_token": True, "hf_token": None, "secret": "", "server": "http://h/?write_token=abc&b=2"},
        "lr": 0.1,
    }
    assert redacted(config, {}) == {
        "task": {**config["task"], "api_key": LEFT_OUT},  # type: ignore[dict-item]
        "data": [{"password": LEFT_OUT, "url": f"https://{LEFT_OUT}@host/x?a=1"}],
        "other": {**config["other"], "server": f"http://h/?write_token={LEFT_OUT}&b=2"},  # type: ignore[dict-item]
        "lr": 0.1,
    }


SIGNED = (
    "https://b.s3.amazonaws.com/x?X-Amz-Security-Token=IQoJ%2F%2Fabc%2Bdef%3D&X-Amz-Date=3&X-Amz-Signature=ab12#top"
)


def test_a_url_is_sent_without_the_secrets_of_its_query_however_they_are_encoded() -> None:
    clean = f"X-Amz-Security-Token={LEFT_OUT}&X-Amz-Date=3&X-Amz-Signature={LEFT_OUT}#top"
    assert redacted(SIGNED, {}) == f"https://b.s3.amazonaws.com/x?{clean}" == redacted(redacted(SIGNED, {}), {})
    assert redacted("http://h/?b=1&to%6Ben=a+b", {}) == f"http://h/?b=1&to%6Ben={LEFT_OUT}"


@pytest.mark.parametrize("text", ["x://" + ":" * 10**6, "?" * 10**6, "&a" * 10**6, "x://a" * 10**5], ids=len)
def test_text_that_means_harm_is_searched_in_no_time(text: str) -> None:
    began = time.process_time()
    assert redacted(text, {}) == text
    assert time.process_time() - began < 5


def test_what_the_environment_keeps_secret_is_left_out_wherever_it_was_copied_to() -> None:
    environment = {"WANDB_API_KEY": "0123456789abcdef", "HF_TOKEN": "short", "PATH": "/usr/local/bin"}
    config = {"note": "with 0123456789abcdef in it", "path": "/usr/local/bin", "word": "short"}
    expected = {"note": f"with {LEFT_OUT} in it", "path": "/usr/local/bin", "word": "short"}
    assert redacted(config, environment) == expected


@pytest.mark.parametrize(
    "section",
    [
        {"wandb": {"project": "x", "api_key": "s3cret"}},
        {"mine": {"type": "a:B", "key": "s3cret"}},
        {"mine": {"type": "a:B", "deep": [{"token": "s3cret"}]}},
        {"mlflow": {"tracking_uri": "https://user:s3cret@host"}},
        {"mine": {"type": "a:B", "server_url": "http://host:7860/?write_token=s3cret"}},
        {"mlflow": {"tracking_uri": "http://host/?api_key=s3cret%2Fs3cret"}},
        {"wanbd": {"api_key": "s3cret"}},
        {"token": "s3cret"},
    ],
)
def test_a_secret_in_the_log_section_is_refused_and_not_repeated(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(RunSettings, {"log": section}, {}, "config")
    assert "s3cret" not in str(refused.value)
    if not {"wanbd", "token"} & section.keys():
        assert "put it into the environment" in str(refused.value)


def test_nor_is_one_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("task: a.py:B\nlog:\n  wandb: {project: x}\n")
    with pytest.raises(ConfigError, match="put it into the environment") as refused:
        load(file, ["log.wandb.api_key=s3cret"])
    assert "s3cret" not in str(refused.value) and "--set log.wandb.api_key=" in str(refused.value)
