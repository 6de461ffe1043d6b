"""What tensor-parallel ranks that share sequences out gather in fp8, by precision.recipe: see fp8.py, note "Tokens"."""

INPUTS_IN_FP8 = ("tensorwise", "delayed", "rowwise")
"""Inputs of products that divide outputs. Rowwise, with a scale for each token beside them. Blocks of 128 tokens, which
columns have, may go across the borders between ranks: those inputs are gathered in the model's format."""
GRADIENTS_IN_FP8 = ("tensorwise", "delayed")
"""Gradients of outputs of products that divide inputs. Others are needed by two scales at once, in rows and in columns:
two bytes a number, as many as the model's format has."""
