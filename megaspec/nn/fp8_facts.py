"""What layers, ranks and the plan alike read of precision.recipe: what tensor-parallel ranks that share sequences out
gather in fp8, see fp8.py, note "Tokens"; bytes of numbers and of scales."""

INPUTS_IN_FP8 = ("tensorwise", "delayed", "rowwise")
"""Inputs of products that divide outputs. Rowwise, with a scale for each token beside them. Blocks of 128 tokens, which
columns have, may go across the borders between ranks: those inputs are gathered in the model's format."""
GRADIENTS_IN_FP8 = ("tensorwise", "delayed")
"""Gradients of outputs of products that divide inputs. Others are needed by two scales at once, in rows and in columns:
two bytes a number, as many as the model's format has."""
VALUE_BYTES = {"nvfp4": 0.5}
"""Of a number in one layout; of others 1."""
NUMBERS_OF_A_SCALE = {"mxfp8": 32, "nvfp4": 16}
"""Of recipes that have a byte of scale for so few numbers that it counts."""
