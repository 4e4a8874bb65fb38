"""Studies: published tables and figures, run at a chosen scale and compared with the published values.

Each folder is one paper: a README with results, one YAML file for each table or figure, and stored results. Start with
`python -m studies`.
"""
