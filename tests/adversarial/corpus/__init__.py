"""The hostile corpus: files that a hostile or broken writer could have written, and what each must end as.

`write.py DIR` writes every one of them with a table of the expected codes; `children.py` runs each in a process
of its own, under an audit hook and limits. The numbers are those of the list that the corpus was built from.
"""
