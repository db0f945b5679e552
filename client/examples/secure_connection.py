r"""An encrypted connection, or mutual TLS, where the client also presents a certificate.

Start the server with its certificate and, for mutual TLS, the authority of its callers:

    npugrad-server serve --listen 0.0.0.0:50051 --tls-certificate server.pem --tls-key server.key \
        --tls-client-ca callers.pem

and this example with the authority that the client trusts, and its certificate:

    python client/examples/secure_connection.py --target host:50051 --ca authority.pem \
        --certificate client.pem --key client.key

Ends with status 1 if it cannot connect. The server makes the operand from a recipe, so that no data is sent;
its digest proves that both sides have the same bits.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from npugrad_client import Client, Recipe, Tls, TransportError

SHAPE = (2, 32, 64, 64)


def call(client: Client) -> None:
    """One call whose operands the server makes, checked by a sum."""
    n, c, height, width = SHAPE
    grad_out = Recipe("normal", shape=SHAPE, seed=1).with_digest()
    grads = client.group_norm_backward(
        grad_out=grad_out,
        input=Recipe("normal", shape=SHAPE, seed=2),
        mean=Recipe("constant", shape=(n, 8), value=0),
        rstd=Recipe("constant", shape=(n, 8), value=1),
        n=n,
        c=c,
        hxw=height * width,
        group=8,
        output_mask=(False, False, True),
        timeout_s=30,
    )
    expected = grad_out.array().sum(axis=(0, 2, 3), dtype=np.float64)
    worst = float(np.abs(np.asarray(grads.grad_beta) - expected).max())
    print(f"grad_beta from {grads.info.device}, {worst:.2g} from the sum on this side")


def main() -> int:
    """Command line; the exit status tells whether the call was served."""
    parser = argparse.ArgumentParser(description="A call over TLS, or mutual TLS.")
    parser.add_argument("--target", default="localhost:50051", help="address of the server")
    parser.add_argument("--ca", help="PEM file of the server's authority; default: those of the system")
    parser.add_argument("--certificate", help="PEM file of the client's own certificate, for mutual TLS")
    parser.add_argument("--key", help="PEM file of its private key")
    options = parser.parse_args()
    tls = Tls(ca=options.ca, certificate=options.certificate, key=options.key)
    try:
        with Client(options.target, tls=tls) as client:
            call(client)
    except TransportError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
