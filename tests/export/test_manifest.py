"""An artifact is used whole or not at all: every kind of damage is refused, naming what is wrong."""

import json
import os
import subprocess
import sys

import pytest
from export_samples import scope, verdict, versions

from optkit.export import manifest as mf


def write(path, **kw):
    args = dict(name="tiny", plan_json='{"plan": 1}', recipe="model: tiny\n", recipe_digest="a" * 64, scope=scope(),
                verdict=verdict(), versions=versions())
    return mf.write_artifact(path, **(args | kw))


KERNEL = mf.Kernel(name="step", grid=(132, 1, 1), block=(288, 1, 1), dynamic_smem=1024,
                   params=(mf.Param(name="table", offset=0, size=8),))


@pytest.fixture
def art(tmp_path):
    return write(tmp_path / "artifact", kernel=KERNEL, cubin=b"\x7fELF cubin")


def test_round_trip(art):
    again = mf.load_artifact(art.path)
    assert again.manifest == art.manifest and again.digest == art.digest
    assert again.plan_json == '{"plan": 1}' and again.cubin == b"\x7fELF cubin"
    assert sorted(again.files) == ["kernel.cubin", "plan.json", "recipe.yaml"]
    assert sorted(os.listdir(art.path.parent)) == ["artifact"], "temporary files left behind"


def test_same_content_same_digest(tmp_path):
    assert write(tmp_path / "a").digest == write(tmp_path / "b").digest
    assert write(tmp_path / "c", recipe="model: other\n").digest != write(tmp_path / "d").digest


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "recipe.yaml", "kernel.cubin"])
def test_every_changed_byte_is_refused(art, name):
    good = (art.path / name).read_bytes()
    step = max(1, len(good) // 97)
    for i in range(0, len(good), step):
        (art.path / name).write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1:])
        with pytest.raises(mf.ArtifactError, match=name.replace(".", r"\.")):
            mf.load_artifact(art.path)
    (art.path / name).write_bytes(good)
    mf.load_artifact(art.path)


def test_edited_verdict_is_refused(art):
    path = art.path / mf.MANIFEST
    path.write_text(path.read_text().replace('"verified except hardware"', '"verified"'))
    with pytest.raises(mf.ArtifactError, match=r"manifest\.json does not match its own digest"):
        mf.load_artifact(art.path)


def test_missing_unlisted_link_folder(art):
    extra = art.path / "extra.txt"
    extra.write_text("x")
    with pytest.raises(mf.ArtifactError, match=r"extra\.txt not listed"):
        mf.load_artifact(art.path)
    extra.unlink()
    (art.path / "sub").mkdir()
    with pytest.raises(mf.ArtifactError, match="sub is not a plain file"):
        mf.load_artifact(art.path)
    (art.path / "sub").rmdir()
    real = art.path.parent / "recipe"
    (art.path / mf.RECIPE).rename(real)
    with pytest.raises(mf.ArtifactError, match=r"recipe\.yaml listed in manifest\.json but missing"):
        mf.load_artifact(art.path)
    (art.path / mf.RECIPE).symlink_to(real)
    with pytest.raises(mf.ArtifactError, match=r"recipe\.yaml is not a plain file"):
        mf.load_artifact(art.path)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "sub/x", ".hidden", "manifest.json"])
def test_listed_path_outside_is_refused(art, name):
    (art.path.parent / "outside").write_text("x")
    files = dict(art.manifest.files) | {name: mf.File(sha256="0" * 64, size=1)}
    forged = art.manifest.model_copy(update={"files": files}).sealed()
    (art.path / mf.MANIFEST).write_bytes(forged.to_bytes())
    with pytest.raises(mf.ArtifactError, match="expected a plain file name"):
        mf.load_artifact(art.path)


def test_other_schema_and_unknown_key(art):
    path = art.path / mf.MANIFEST
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"schema": "optkit-artifact/9"}))
    with pytest.raises(mf.ArtifactError, match="optkit-artifact/9.*expected 'optkit-artifact/1'"):
        mf.load_artifact(art.path)
    path.write_text(json.dumps(raw | {"surprise": 1}))
    with pytest.raises(mf.ArtifactError, match="surprise"):
        mf.load_artifact(art.path)


def test_nothing_half_written(tmp_path, monkeypatch):
    target = tmp_path / "artifact"
    monkeypatch.setattr(mf.Path, "rename", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(target)
    assert list(tmp_path.iterdir()) == []


def test_existing_directory_is_kept(art):
    with pytest.raises(mf.ArtifactError, match="exists already"):
        write(art.path)
    mf.load_artifact(art.path)


def test_kernel_and_cubin_belong_together(tmp_path):
    with pytest.raises(mf.ArtifactError, match="belong together"):
        write(tmp_path / "a", kernel=KERNEL)


def test_hardware_evidence_is_matched_by_cubin(art):
    own = art.manifest.files[mf.CUBIN].sha256
    hw = dict(gpu="H200", evidence_sha256="e" * 64)
    with pytest.raises(mf.ArtifactError, match="evidence is of cubin ffffffffffffffff"):
        mf.set_verdict(art.path, mf.Verdict(status="verified", hardware=mf.Hardware(cubin_sha256="f" * 64, **hw)))
    new = mf.set_verdict(art.path, mf.Verdict(status="verified", hardware=mf.Hardware(cubin_sha256=own, **hw)))
    assert new.manifest.verdict.status == "verified" and new.digest != art.digest
    assert sorted(os.listdir(art.path.parent)) == ["artifact"]


def test_config_digest_ignores_bookkeeping_only():
    base = {"hidden_size": 8, "transformers_version": "5.1"}
    assert mf.config_digest(base) == mf.config_digest({"hidden_size": 8, "dtype": "bfloat16"})
    assert mf.config_digest(base) != mf.config_digest({"hidden_size": 9})


def test_imports_neither_torch_nor_hydra_nor_cutlass():
    modules = ", ".join(f"optkit.export.{m}" for m in ("manifest", "scope", "support", "vllm_plugin", "backend"))
    code = (f"import sys, {modules}; bad = {{'torch', 'hydra', 'omegaconf', 'cutlass', 'vllm'}} & set(sys.modules);"
            "sys.exit(str(bad) if bad else 0)")
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_nesting_without_end_is_not_json(art):
    (art.path / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(mf.ArtifactError, match="is not JSON"):
        mf.load_artifact(art.path)
