"""Training large language models on meshes of accelerators with JAX."""
