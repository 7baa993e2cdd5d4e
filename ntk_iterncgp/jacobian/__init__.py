"""J, Jᵀ and rows of a network: by autograd, by layers, and of a linear last layer."""
