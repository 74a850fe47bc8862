"""Functions of the user's own, named ``module:function`` in the config."""
