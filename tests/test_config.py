"""Configuration is read strictly, whatever carries it, and an unknown name lists the known ones."""

from __future__ import annotations

import dataclasses
import types

import pytest

from npu_backend import families
from npu_backend.config import model_types_of, parse_bool, read_config, read_environment
from npu_backend.errors import ConfigError


class Frozen:
    """verl's BaseConfig in short: a `.get`, no mapping."""

    def __init__(self, **values: object) -> None:
        self._values = values

    def get(self, key: str, default: object = None) -> object:
        return self._values.get(key, default)


@dataclasses.dataclass
class Plain:
    use_liger: object = False
    fused_kernel_options: object = None


@pytest.mark.case("A36")
@pytest.mark.parametrize("make", [dict, Frozen, lambda **v: Plain(**v), lambda **v: types.SimpleNamespace(**v)])
def test_every_carrier_of_a_configuration_is_read(make):
    config = read_config(make(use_liger=True, fused_kernel_options={"impl_backend": "auto"}))
    assert (config.use_liger, config.impl_backend, config.impl_backend_given) == (True, "auto", True)


@pytest.mark.case("A36")
def test_omegaconf_is_read():
    omegaconf = pytest.importorskip("omegaconf")
    node = omegaconf.OmegaConf.create({"use_liger": "true", "fused_kernel_options": {"impl_backend": "triton"}})
    assert (read_config(node).use_liger, read_config(node).impl_backend) == (True, "triton")


@pytest.mark.case("A36", "D41")
def test_none_means_the_defaults_and_the_fused_head_is_off():
    config = read_config(None)
    assert (config.use_liger, config.use_fused_kernels, config.impl_backend) == (False, False, "torch")
    assert not config.impl_backend_given


@pytest.mark.case("A36")
@pytest.mark.parametrize("value", [True, "true", "True", " TRUE "])
def test_true(value):
    assert parse_bool(value, "x") is True


@pytest.mark.case("A36")
@pytest.mark.parametrize("value", [False, "false", "False", None])
def test_false(value):
    # The case asks for an error on 'false'; the contract reads string forms and errs on everything else, 'maybe' below.
    assert parse_bool(value, "x") is False


@pytest.mark.case("A36")
@pytest.mark.parametrize("value", ["maybe", "", "yes", "on", 2, 1, 0, [], "1"])
def test_anything_else_is_no_boolean(value):
    for key in ("use_liger", "use_fused_kernels"):
        with pytest.raises(ConfigError, match=key):
            read_config({key: value})


@pytest.mark.parametrize("carrier", ["qwen3", ["qwen3"], 3, types.SimpleNamespace(model_type="qwen3")])
def test_what_is_no_model_configuration(carrier):
    with pytest.raises(ConfigError, match="model_config"):
        read_config(carrier)


@pytest.mark.parametrize("hf_config", ["Qwen/Qwen3-0.6B", {}, types.SimpleNamespace(model_type=""), 3])
def test_an_hf_config_without_a_model_type_would_patch_everything(hf_config):
    with pytest.raises(ConfigError, match=r"hf_config has no model_type"):
        read_config({"hf_config": hf_config})


@pytest.mark.parametrize("options", ["torch", 3, ["torch"]])
def test_options_that_are_no_mapping(options):
    with pytest.raises(ConfigError, match="fused_kernel_options must be a mapping"):
        read_config({"fused_kernel_options": options})


@pytest.mark.parametrize("name", ["cuda", "Torch", "", 7])
def test_an_unknown_backend_lists_the_known_ones(name):
    with pytest.raises(ConfigError, match="torch, triton, liger, auto"):
        read_config({"fused_kernel_options": {"impl_backend": name}})


def test_model_types_come_from_sub_configs_too():
    text = types.SimpleNamespace(model_type="qwen2")
    vlm = types.SimpleNamespace(model_type="llava", text_config=text, vision_config={"model_type": "clip"}, size=3)
    vlm.itself = vlm  # a cycle does no harm
    assert model_types_of(vlm) == ("llava", "qwen2", "clip")
    assert families.families_of(("qwen3_vl", "qwen3_vl_text", "unheard_of")) == ("qwen3_vl",)
    assert model_types_of(None) == ()


def test_the_environment(monkeypatch):
    assert read_environment().strict is False
    for name, value in {
        "NPU_BACKEND_STRICT": "1",
        "NPU_BACKEND_SKIP": "rope, qwen3_moe,qwen3.rms_norm,qwen2.mlp",
        "NPU_BACKEND_DEVICE": "CPU",
        "NPU_BACKEND_LOGITS_CACHE_GIB": "1.5",
        "NPU_BACKEND_BATCH_INVARIANT": "true",
    }.items():
        monkeypatch.setenv(name, value)
    environment = read_environment()
    assert environment.strict
    assert environment.batch_invariant
    assert environment.skip == ("rotary", "qwen3_moe", "qwen3.rms_norm", "qwen2.gated_mlp")
    assert (environment.device, environment.logits_cache_gib) == ("cpu", 1.5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("NPU_BACKEND_STRIKT", "1", "NPU_BACKEND_STRICT"),
        ("NPU_BACKEND_STRICT", "perhaps", "true or false"),
        ("NPU_BACKEND_SKIP", "ropes", "rotary"),
        ("NPU_BACKEND_SKIP", "qwen3.ropes", "rotary"),
        ("NPU_BACKEND_SKIP", "qwen9.rotary", "qwen3"),
        ("NPU_BACKEND_DEVICE", "tpu", "npu, cuda, cpu"),
        ("NPU_BACKEND_LOGITS_CACHE_GIB", "-1", "GiB"),
        ("NPU_BACKEND_LOGITS_CACHE_GIB", "nan", "GiB"),
        ("NPU_BACKEND_LOGITS_CACHE_GIB", "lots", "auto"),
        ("NPU_BACKEND_VIRTUAL_NPU", "0", "1 to 64"),
        ("NPU_BACKEND_LOG", "chatty", "DEBUG"),
    ],
)
def test_a_bad_variable_lists_what_is_known(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        read_environment()
