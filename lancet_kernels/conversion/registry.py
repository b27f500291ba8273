"""Which model families can be converted, by the class name of their MoE block."""

from lancet_kernels.conversion.deepseek import DeepseekV2, DeepseekV3
from lancet_kernels.conversion.family import Family
from lancet_kernels.conversion.gpt_oss import GptOss
from lancet_kernels.conversion.softmax import Mixtral, Olmoe, Qwen2Moe, Qwen3Moe

FAMILIES: tuple[Family, ...] = (
    Mixtral(),
    Olmoe(),
    Qwen3Moe(),
    Qwen2Moe(),
    DeepseekV3(),
    DeepseekV2(),
    GptOss(),
)

BY_BLOCK = {block: family for family in FAMILIES for block in family.blocks}
