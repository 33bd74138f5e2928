"""The operations of pyfuse3, and the namespace behind them."""
