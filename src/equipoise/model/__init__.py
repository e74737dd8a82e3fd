"""The models that are compared, in torch: plain layers, routed experts, and the decoder made of them."""
