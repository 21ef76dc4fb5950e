"""The benchmark behind ``python -m anycell bench``.

Read it in this order: ``shapes`` (what is measured), ``problem`` (the same numbers for everybody),
``tasks`` and ``contenders`` (who runs; each is built in the module of its framework, and in a
checkout also in ``benchmarks/rivals``), ``gate`` (a wrong contender is not timed), ``timing``
(interleaved runs), ``machine`` (the matmul bound), ``probe`` (what only a fresh process can tell),
``results`` (what was measured), ``runner`` (which measures it), ``report`` and ``chart`` (what you
see), ``command`` (from the options to the files).

Only that command imports this package, which needs PyTorch. The extra ``bench`` adds the chart,
colour, and what some contenders need.
"""
