"""`report.html`: its figures, tables and the numbers behind them."""
