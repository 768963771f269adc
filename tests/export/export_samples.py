"""A small artifact's parts, and the engine facts that fit them."""

from optkit.export.manifest import Scope, Verdict, Versions
from optkit.export.support import Facts

SHAPE = {"hidden": 256, "layers": 9, "eps": 1e-5}
DTYPES = {"activation": "bf16", "kv": "bf16", "conv": "bf16", "recurrent": "f32"}


def scope(**kw):
    return Scope(**(dict(family="kimi_k3", architectures=("KimiK3ForConditionalGeneration",), shape=SHAPE,
                         config_digest="c" * 64, layers=(0, 9), batch=(1, 2, 4), rows=8, context=512, tp=1, pp=1,
                         dtypes=DTYPES, block_size_multiple=16, arch="sm_90a", sms=132) | kw))


def verdict(**kw):
    return Verdict(**(dict(status="verified except hardware", not_run=3) | kw))


def versions(**kw):
    return Versions(**(dict(optkit="0.1.0", torch="2.13.0") | kw))


def facts(**kw):
    return Facts(**(dict(device="cpu", vllm="0.32.0+cpu", architectures=("KimiK3ForConditionalGeneration",),
                         config_digest="c" * 64, shape=SHAPE, dtypes=DTYPES, block_size=256, max_num_seqs=4,
                         max_model_len=512) | kw))
