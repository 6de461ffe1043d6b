"""What the time of a training step is spent on: the words that a measurement and a plan share. Torch-free."""

MATRIX_PRODUCTS = "matrix products"
ATTENTION = "attention"
ELEMENT_WISE = "element-wise"
OPTIMIZER = "optimizer"
COMMUNICATION = "exposed communication"
COPIES = "copies"
OTHER = "other"
IDLE = "idle"

MEANINGS: dict[str, str] = {
    MATRIX_PRODUCTS: "linear layers, experts, the output head; forward and both gradients",
    ATTENTION: "the core of attention, forward and backward, without its projections",
    ELEMENT_WISE: "all else that is computed on activations and gradients: norms, activations, routers, the loss",
    OPTIMIZER: "the gradient norm, the update, and the copy of master weights into the model",
    COMMUNICATION: "messages between ranks beside which nothing is computed, the wait for late ranks included",
    COPIES: "copies, fills and concatenations beside which nothing else is computed",
    OTHER: "what none of these fits; the largest are named",
    IDLE: "the device has nothing to do: it waits for the host",
}
"""By kind, in the order of tables."""
KINDS = tuple(MEANINGS)
