"""python -m jaxscale.plan: ranked layouts of a model on a cluster. (The search comes next.)"""
