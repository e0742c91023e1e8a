"""The words of the command line; light, so that --help is quick."""

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_QUANTS)
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
MODES = ("affine", "mxfp4", "nvfp4", "mxfp8")
MLX_LM_RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
SMALL = "small_4_6"
RECIPES = (SMALL, *MLX_LM_RECIPES)
