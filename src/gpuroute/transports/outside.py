"""The way to hosts that are no pools: that of a client without a router, through its proxies and mounts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Outside:
    """A client's own transport, and those that it has for some hosts. Chosen as the client itself does."""

    def __init__(self, transport: Any, mounts: Mapping[Any, Any]) -> None:
        self._transport = transport
        self._mounts = mounts

    @classmethod
    def of(cls, client: Any) -> Outside:
        """The ways of a client of the library."""
        return cls(client._transport, client._mounts)  # noqa: SLF001

    def _to(self, url: Any) -> Any:
        mounted = next((found for pattern, found in self._mounts.items() if pattern.matches(url)), None)
        return self._transport if mounted is None else mounted

    def _all(self) -> list[Any]:
        return [self._transport, *filter(None, self._mounts.values())]

    def handle_request(self, request: Any) -> Any:
        """As that of a transport."""
        return self._to(request.url).handle_request(request)

    async def handle_async_request(self, request: Any) -> Any:
        """As that of a transport."""
        return await self._to(request.url).handle_async_request(request)

    def close(self) -> None:
        """Close all of them."""
        for transport in self._all():
            transport.close()

    async def aclose(self) -> None:
        """Close all of them."""
        for transport in self._all():
            await transport.aclose()
