"""The XML API of Google Cloud Storage, which clients of objects use, over that of an emulator.

fake-gcs-server accepts conditions in its JSON API only; so uploads are sent there. Its XML listing
has neither pages nor an offset, and it has no uploads in parts: both are added.
"""

from __future__ import annotations

import http.client
import threading
import uuid
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit
from xml.etree import ElementTree

from tests.fault_proxy import Reply, send

Parts = dict[int, bytes]
"""The parts of an upload by number."""
_uploads: dict[str, Parts] = {}
_lock = threading.Lock()
_NO_BUCKET = b"<Error><Code>NoSuchBucket</Code><Message>No such bucket.</Message></Error>"


def forward(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
) -> Reply:
    """Send a request of the XML API to the emulator."""
    headers = {name: value for name, value in headers.items() if name.lower() != "host"}
    headers["Host"] = f"{connection.host}:{connection.port}"  # it serves no other
    address = urlsplit(path)
    bucket, _, key = address.path.removeprefix("/").partition("/")
    query = dict(parse_qsl(address.query, keep_blank_values=True))
    if not key:
        return _list(connection, bucket, headers, query)
    if method == "POST" and "uploads" in query:
        upload = uuid.uuid4().hex
        with _lock:
            _uploads[upload] = {}
        root = "InitiateMultipartUploadResult"
        return 200, {}, f"<{root}><UploadId>{upload}</UploadId></{root}>".encode()
    if "uploadId" in query:
        parts = _uploads[query["uploadId"]]
        if method == "PUT":
            with _lock:
                parts[int(query["partNumber"])] = body
            return 200, {"ETag": f'"{query["partNumber"]}"'}, b""
        if method == "POST":
            body = b"".join(parts[number] for number in sorted(parts))
            status, _, content = _upload(connection, bucket, key, headers, body)
            root = "CompleteMultipartUploadResult"
            return (
                status,
                {},
                f"<{root}><ETag>x</ETag></{root}>".encode() if status == 200 else content,
            )
        return 204, {}, b""
    if "x-goog-copy-source" in headers:
        return _copy(connection, bucket, key, headers)
    if method == "PUT":
        return _upload(connection, bucket, key, headers, body)
    return send(connection, method, path, headers, body)


def _upload(
    connection: http.client.HTTPConnection,
    bucket: str,
    key: str,
    headers: Mapping[str, str],
    body: bytes,
) -> Reply:
    """Upload an object by the JSON API, with the condition of the headers."""
    query = {"uploadType": "media", "name": unquote(key)}
    condition = headers.get("x-goog-if-generation-match")
    if condition is not None:
        query["ifGenerationMatch"] = condition
    own = {"Host": headers["Host"], "Content-Length": str(len(body))}
    path = f"/upload/storage/v1/b/{bucket}/o?{urlencode(query)}"
    status, _, content = send(connection, "POST", path, own, body)
    return status, {"ETag": '"x"'}, _NO_BUCKET if status == 404 else content


def _copy(
    connection: http.client.HTTPConnection, bucket: str, key: str, headers: Mapping[str, str]
) -> Reply:
    """Copy an object by the JSON API."""
    from_bucket, _, from_key = headers["x-goog-copy-source"].partition("/")
    path = f"/storage/v1/b/{from_bucket}/o/{from_key}/rewriteTo/b/{bucket}/o/{key}"
    own = {"Host": headers["Host"], "Content-Length": "0"}
    status, _, content = send(connection, "POST", path, own, b"")
    return status, {}, content


def _list(
    connection: http.client.HTTPConnection,
    bucket: str,
    headers: Mapping[str, str],
    query: Mapping[str, str],
) -> Reply:
    """List objects in pages, after an offset; with a delimiter, those of one level."""
    prefix = query.get("prefix", "")
    path = f"/{bucket}?{urlencode({'prefix': prefix})}"
    status, own, content = send(connection, "GET", path, headers, b"")
    if status != 200:
        return 404, {}, _NO_BUCKET
    root = ElementTree.fromstring(content)
    after = max(query.get("continuation-token", ""), query.get("start-after", ""))
    entries = {entry.findtext("Key") or "": entry for entry in root.findall("Contents")}
    for entry in entries.values():
        root.remove(entry)
    if "delimiter" in query:
        parts = {key: key.removeprefix(prefix).partition("/") for key in entries}
        for name in sorted({first for first, slash, _ in parts.values() if slash}):
            level = ElementTree.SubElement(root, "CommonPrefixes")
            ElementTree.SubElement(level, "Prefix").text = f"{prefix}{name}/"
        entries = {key: entry for key, entry in entries.items() if not parts[key][1]}
    following = sorted(key for key in entries if key > after)
    page = following[: int(query.get("max-keys", 1000))]
    root.extend(entries[key] for key in page)
    if len(page) < len(following):
        ElementTree.SubElement(root, "NextContinuationToken").text = page[-1]
    return 200, {"Content-Type": own.get("Content-Type", "")}, ElementTree.tostring(root)
