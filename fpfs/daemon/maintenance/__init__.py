"""What works on a filesystem in use: devices that come and go, scrubs, orphans, takeover."""
