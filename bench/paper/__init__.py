"""The papers' figures and tables, reproduced: one file each, ``python -m bench.paper``.

(a) Arpit, Campos & Bengio 2019; (b) Zhang, Dauphin & Ma (ZeroInit, Fixup); (c) Daneshmand, Joudaki & Bach 2021;
(d) Hlav 2019. Each file says what it reproduces and what its small size leaves out, splits the work into seeded,
independent jobs, reduces their results to the figure's data, and judges the paper's claims by predicates that were
written from the paper; where one was changed after a first look at data, the figure's note says so.
``FIGURES`` lists them in the order in which they are made.
"""

FIGURES = (
    "a_figure1",
    "a_figure2",
    "a_figure3",
    "a_figure4",
    "a_table1",
    "a_table2",
    "b_table1",
    "b_figure2",
    "c_figure1",
    "c_figure2",
    "c_figure3",
    "c_figure4",
    "c_figure5",
    "c_figure6",
    "c_figure7",
    "d_spectra",
    "d_rnn",
)
