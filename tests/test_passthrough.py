"""mlx-lm's own commands on a Wiola model: what is checked and refused before they run."""

import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten

from wiola_mlx import WiolaError
from wiola_mlx.loading import resolve
from wiola_mlx.passthrough import checked_arguments


@pytest.mark.parametrize("word", ["--max-kv-size", "--max-kv", "--max-kv-size=9"])
def test_options_that_cannot_work_are_refused_even_shortened(word):
    with pytest.raises(WiolaError, match="not supported"):
        checked_arguments("chat", [word, "9"])
    with pytest.raises(WiolaError, match="not supported"):
        checked_arguments("fuse", ["--export-g"])


def test_other_options_and_values_pass_as_they_are():
    for argv in (["--max", "64"], ["--prompt=-hello=x"], ["--seed", "3", "-c=1"][:2]):
        assert checked_arguments("lora", argv) == argv


def test_a_draft_model_is_refused_for_the_server_only(checkpoint):
    argv = ["--model", str(checkpoint), "--draft-model", str(checkpoint)]
    with pytest.raises(WiolaError, match="server --draft-model"):
        checked_arguments("server", argv)
    assert checked_arguments("benchmark", argv) == argv


def test_issue_K1_a_stray_that_mlx_lm_would_merge_is_refused(own_checkpoint):
    stray = {k: v + 1 for k, v in tree_flatten(tiny.random_model(3).parameters())}
    mx.save_safetensors(str(own_checkpoint / "model-old.safetensors"), stray)
    for option in ("--model", "--mod", "--hf-path"):
        with pytest.warns(UserWarning), pytest.raises(WiolaError, match=r"model-old.*move it away"):
            checked_arguments("convert", [option, str(own_checkpoint)])
        with pytest.warns(UserWarning), pytest.raises(WiolaError, match="model-old"):
            checked_arguments("convert", [f"{option}={own_checkpoint}"])


def test_issue_A3_code_is_refused_in_any_spelling(own_checkpoint, tmp_path):
    tiny.edit_json(own_checkpoint / "config.json", model_file="evil.py")
    settings = tmp_path / "lora.yaml"
    settings.write_text(f"model: {own_checkpoint}\n")
    for argv in (
        ["--model", str(own_checkpoint)],
        ["--mod", str(own_checkpoint)],
        [f"--model={own_checkpoint}"],
        ["-c", str(settings)],
        [f"-c{settings}"],
        ["--conf", str(settings)],
        ["--config", str(settings)],
    ):
        with pytest.raises(WiolaError, match="never run"):
            checked_arguments("lora", argv)


def test_a_configuration_may_not_name_a_model_that_mlx_lm_would_look_for_elsewhere(tmp_path):
    (tmp_path / "lora.yaml").write_text("model: builtin\n")
    with pytest.raises(WiolaError, match="--model builtin"):
        checked_arguments("lora", ["-c", str(tmp_path / "lora.yaml")])
    with pytest.raises(WiolaError, match="no configuration file"):
        checked_arguments("lora", ["-c", str(tmp_path / "none.yaml")])


def test_names_are_resolved_or_refused():
    assert checked_arguments("chat", ["--model", "builtin"])[1] == str(resolve("builtin"))
    assert checked_arguments("chat", ["--model", "some/model"])[1] == "some/model"
    with pytest.raises(WiolaError, match="no model folder"):
        checked_arguments("chat", ["--model", "no-such-folder"])


def test_issue_D5_fusing_into_a_quantized_model_is_noted(capsys):
    argv = ["--model", "builtin", "--adapter-path", "x"]
    checked_arguments("fuse", argv)
    assert "--dequantize" in capsys.readouterr().err
    checked_arguments("fuse", [*argv, "--dequantize"])
    assert capsys.readouterr().err == ""


def test_a_command_that_lacks_a_package_says_which(cli, checkpoint):
    result = cli("lm_eval", "--model", checkpoint, "--tasks", "x", module="wiola_mlx")
    assert result.returncode == 1
    assert b"pip install lm_eval" in result.stderr and b"Traceback" not in result.stderr
