import triton


@triton.jit
def scaled(value, factor):
    return value * factor
