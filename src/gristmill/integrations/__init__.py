"""Where gristmill plugs into other programs: vLLM, Hugging Face's models, DTensor.

Importing gristmill imports none of those programs. Of what is here it imports `patch` and
`unpatch`, which need only torch; vLLM finds its plugin by entry points, and the rules for DTensor
are imported when an op first sees one (`teach_dtensor` in `ops/op.py`).
"""
