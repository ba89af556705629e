"""Parts of HTTP servers on aiohttp, for the embedded server, the gateway and the dashboard."""
