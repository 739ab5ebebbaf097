# A static binary on a base without shell or package manager, as a user without rights. Images are pinned by digest; the tag next to it
# is for people and for the updates of .github/dependabot.yml.
FROM --platform=$BUILDPLATFORM golang:1.26.8@sha256:6c2a5538f964f1c82f97ad14988bf05de100d922d159d0e398b54c7b0ca0c6c9 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=dev TARGETOS TARGETARCH
ENV GOOS=$TARGETOS GOARCH=$TARGETARCH
RUN CGO_ENABLED=0 go build -tags release -trimpath -buildvcs=false -ldflags="-s -w -buildid= -X main.version=$VERSION" -o /outrelay ./cmd/outrelay

# The programs of examples/orders, for compose.yaml: docker build --target examples
FROM build AS build-examples
RUN CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags="-s -w" -o /examples/ ./examples/orders/service ./examples/orders/payment ./examples/orders/projector

FROM gcr.io/distroless/static-debian12:nonroot@sha256:afa5c872c891853ca7fcf1f12c3edb23f7eeef36189728842dd51042ff57f7ab AS examples
COPY --from=build-examples /examples /examples
CMD ["/examples/service"]

FROM gcr.io/distroless/static-debian12:nonroot@sha256:afa5c872c891853ca7fcf1f12c3edb23f7eeef36189728842dd51042ff57f7ab
ARG VERSION=dev
LABEL org.opencontainers.image.title="outrelay" \
      org.opencontainers.image.description="Relays the events of MongoDB outbox collections to Kafka" \
      org.opencontainers.image.source="https://github.com/outrelay/outrelay" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION"
COPY --from=build /outrelay /outrelay
USER 65532:65532
EXPOSE 9464
ENTRYPOINT ["/outrelay"]
CMD ["run"]
