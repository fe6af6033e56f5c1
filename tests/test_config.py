"""Configuration is read strictly, whatever carries it, and an unknown name lists the known ones."""

from __future__ import annotations

import dataclasses
import re
import types
from pathlib import Path

import pytest

from npu_backend import families
from npu_backend.config import cache_folder, model_types_of, parse_bool, read_config, read_environment
from npu_backend.errors import ConfigError, did_you_mean


class Frozen:
    """verl's BaseConfig in short: a `.get`, no mapping."""

    def __init__(self, **values: object) -> None:
        self._values = values

    def get(self, key: str, default: object = None) -> object:
        return self._values.get(key, default)


class KeyedFrozen(Frozen):
    """The same with the other methods of a mapping, as verl's own has them."""

    def keys(self):
        return self._values.keys()

    def __iter__(self):
        return iter(self._values)


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


def test_an_omegaconf_node_may_have_values_that_are_missing():
    omegaconf = pytest.importorskip("omegaconf")
    config = {"use_liger": "???", "hf_config": {"model_type": "qwen3", "hidden_size": "???"}}
    assert read_config(omegaconf.OmegaConf.create(config)).model_types == ("qwen3",)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"use_liger": "${absent}"}, "use_liger of a DictConfig cannot be read: InterpolationKeyError"),
        ({"hf_config": {"model_type": "qwen3", "x": "${absent}"}}, "x of a DictConfig cannot be read"),
        (["qwen3"], "of a ListConfig cannot be read"),
    ],
)
def test_an_omegaconf_node_that_cannot_be_read_is_named(content, named):
    omegaconf = pytest.importorskip("omegaconf")
    with pytest.raises(ConfigError, match=named):
        read_config(omegaconf.OmegaConf.create(content))


def test_a_user_without_a_home_is_told_to_name_a_folder_for_caches(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does for a user that is not listed
    with pytest.raises(ConfigError, match="no home directory; set XDG_CACHE_HOME"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/npu-backend")


def test_a_property_that_fails_is_named():
    class Unreadable:
        @property
        def use_liger(self):
            raise RuntimeError("no such file")

    with pytest.raises(ConfigError, match="use_liger of a Unreadable cannot be read: RuntimeError: no such file"):
        read_config(Unreadable())


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


def test_a_setting_that_only_a_variable_has_is_not_ignored_in_the_options():
    with pytest.raises(ConfigError, match=r"logits_cache_gib is not read; set .* NPU_BACKEND_LOGITS_CACHE_GIB"):
        read_config({"fused_kernel_options": {"impl_backend": "triton", "logits_cache_gib": 0}})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("use_lieger", "use_liger"),
        ("use_lgier", "use_liger"),
        ("Use_Liger", "use_liger"),
        ("use-liger", "use_liger"),
        ("use_fused_kernel", "use_fused_kernels"),
        ("fused_kernels_options", "fused_kernel_options"),
        ("hf_confg", "hf_config"),
    ],
)
def test_a_key_that_is_nearly_ours_would_change_nothing_silently(key, meant):
    for carrier in ({key: True}, KeyedFrozen(**{key: True})):
        with pytest.raises(ConfigError, match=rf"^model_config has a key '{key}' .*did you mean '{meant}'"):
            read_config(carrier)


def test_the_keys_of_fused_kernel_options_are_checked_too():
    with pytest.raises(ConfigError, match=r"fused_kernel_options has a key 'impl_backed' .*'impl_backend'"):
        read_config({"fused_kernel_options": {"impl_backed": "triton"}})
    omegaconf = pytest.importorskip("omegaconf")
    with pytest.raises(ConfigError, match="did you mean 'use_liger'"):
        read_config(omegaconf.OmegaConf.create({"use_ligr": True}))


def test_keys_of_others_pass():
    others = {"backend": 1, "config": 1, "tf_config": 1, "hf_config_path": 1, "use_remove_padding": 1, 7: 1, None: 1}
    assert read_config({**others, "use_liger": True, "fused_kernel_options": others}).use_liger


def test_no_key_of_verl_is_taken_for_ours():
    verl_s = pytest.importorskip("verl.workers.config.model")
    keys = {field.name: None for field in dataclasses.fields(verl_s.HFModelConfig)}
    assert {"use_liger", "use_fused_kernels", "use_remove_padding", "lora_rank"} <= set(keys)
    assert read_config(keys) == read_config(None)


def test_no_key_in_the_files_of_verl_is_taken_for_ours():
    folder = Path(pytest.importorskip("verl.trainer").__file__).parent / "config"  # `verl` alone finds tests/verl
    keys = {key for file in folder.rglob("*.yaml") for key in re.findall(r"^ *(\w+):", file.read_text(), re.MULTILINE)}
    assert len(keys) > 300
    ours = {"use_liger", "use_fused_kernels", "fused_kernel_options", "hf_config", "impl_backend"}
    assert ours & keys
    foreign = dict.fromkeys(keys - ours)
    assert read_config({**foreign, "fused_kernel_options": foreign}) == read_config(None)


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
        ("NPU_BACKEND_STRICT", "yes", r"must be 1 or 0 .*, got 'yes'"),
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


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("NPU_BACKEND_STRIKT", "1", "STRICT"),
        ("NPU_BACKEND_SKIP", "rmsnorm", "rms_norm"),
        ("NPU_BACKEND_SKIP", "RoPE", "rope"),
        ("NPU_BACKEND_SKIP", "Qwen3", "qwen3"),
        ("NPU_BACKEND_SKIP", "qwen3.rmsnorm", "qwen3.rms_norm"),
        ("NPU_BACKEND_DEVICE", "cudaa", "cuda"),
        ("NPU_BACKEND_LOG", "warn", "WARNING"),
    ],
)
def test_a_near_miss_in_a_variable_is_told(monkeypatch, name, value, meant):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"; did you mean '{meant}'\?$"):
        read_environment()


def test_a_near_miss_of_a_backend_is_told():
    with pytest.raises(ConfigError, match=r"; did you mean 'triton'\?$"):
        read_config({"fused_kernel_options": {"impl_backend": "tritn"}})


def test_what_is_like_nothing_has_no_suggestion(monkeypatch):
    assert did_you_mean("foo", ["Ascend910B1", "Ascend950PR_959b"]) == did_you_mean(7, ["torch"]) == ""
    monkeypatch.setenv("NPU_BACKEND_FOO", "1")  # with its prefix it would be like any other variable
    with pytest.raises(ConfigError, match=r"^unknown environment variable NPU_BACKEND_FOO; known: [A-Z_, ]+$"):
        read_environment()
