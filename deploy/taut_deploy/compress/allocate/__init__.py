"""One size for a whole stage, shared among its layers by what each loses: ranks, sparsities."""
