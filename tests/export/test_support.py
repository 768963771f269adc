"""`unsupported` names every unmet requirement, and nothing else."""

import pytest
from export_samples import facts, scope, verdict, versions

from optkit.export.manifest import CUBIN, File, Hardware, Kernel, Manifest
from optkit.export.support import unsupported


def manifest(kernel=False, **kw):
    files = {"plan.json": File(sha256="1" * 64, size=1), "recipe.yaml": File(sha256="2" * 64, size=1)}
    if kernel:
        files[CUBIN] = File(sha256="3" * 64, size=1)
    k = Kernel(name="step", grid=(132, 1, 1), block=(288, 1, 1), dynamic_smem=0, params=()) if kernel else None
    parts = dict(scope=scope(), verdict=verdict(), versions=versions()) | kw
    return Manifest(name="tiny", recipe_digest="a" * 64, plan_digest="1" * 64, kernel=k, files=files, **parts).sealed()


def test_fits():
    assert unsupported(manifest(), facts()) == []


@pytest.mark.parametrize("change, word", [
    (dict(vllm="0.31.9"), "vLLM version"), (dict(vllm="0.34.0"), "vLLM version"),
    (dict(vllm="unknown"), "vLLM version"),
    (dict(architectures=("LlamaForCausalLM",)), "architecture"), (dict(config_digest="d" * 64), "config.json digest"),
    (dict(shape={"hidden": 512, "layers": 9, "eps": 1e-5}), "model constant hidden"),
    (dict(shape={"hidden": 256, "layers": 9}), "model constant eps"),
    (dict(dtypes={"activation": "bf16", "kv": "fp8", "conv": "bf16", "recurrent": "f32"}), "kv dtype"),
    (dict(tp=2), "tensor parallel size"), (dict(pp=2), "pipeline parallel size"), (dict(pp_rank=1), "pipeline stage"),
    (dict(block_size=24), "cache block size"), (dict(block_size=8192), "cache block size"),
    (dict(max_num_seqs=5), "max_num_seqs"), (dict(max_model_len=513), "max_model_len"),
    (dict(features=("speculative decoding",)), "speculative decoding"),
])
def test_one_mismatch_one_reason(change, word):
    reasons = unsupported(manifest(), facts(**change))
    assert len(reasons) == 1 and word in reasons[0], reasons


def test_all_reasons_at_once():
    reasons = unsupported(manifest(), facts(tp=8, pp=2, max_num_seqs=64, vllm="0.40.0", features=("LoRA", "DBO")))
    assert len(reasons) == 6, reasons


def test_scope_mismatches():
    assert "emulates its peers" in unsupported(manifest(scope=scope(peers="emulated")), facts())[0]
    assert "rows per request" in unsupported(manifest(scope=scope(rows_per_request=2)), facts())[0]
    assert "rank" in unsupported(manifest(scope=scope(rank=3)), facts())[0]
    assert "failed its checks" in unsupported(manifest(verdict=verdict(status="failed")), facts())[0]


def test_gpu_needs_kernel_hardware_and_evidence():
    gpu = dict(device="cuda", arch="sm_90a", sms=132)
    assert ["kernel: the artifact holds none"] == unsupported(manifest(), facts(**gpu))
    assert "no hardware evidence" in unsupported(manifest(kernel=True), facts(**gpu))[0]
    other = verdict(status="verified", hardware=Hardware(cubin_sha256="4" * 64, gpu="H200", evidence_sha256="5" * 64))
    assert "no hardware evidence" in unsupported(manifest(kernel=True, verdict=other), facts(**gpu))[0]
    own = verdict(status="verified", hardware=Hardware(cubin_sha256="3" * 64, gpu="H200", evidence_sha256="5" * 64))
    good = manifest(kernel=True, verdict=own)
    assert unsupported(good, facts(**gpu)) == []
    assert "GPU architecture" in unsupported(good, facts(**gpu | dict(arch="sm_100a")))[0]
    assert "SMs" in unsupported(good, facts(**gpu | dict(sms=114)))[0]


def test_cpu_needs_no_gpu_and_no_evidence():
    assert unsupported(manifest(kernel=True), facts(arch="", sms=0)) == []
