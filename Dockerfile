# A static binary on a base without shell or package manager, as a user without rights.
FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 go build -tags release -trimpath -buildvcs=false -ldflags="-s -w -buildid=" -o /outrelay ./cmd/outrelay

# The programs of examples/orders, for compose.yaml: docker build --target examples
FROM build AS build-examples
RUN CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags="-s -w" -o /examples/ ./examples/orders/service ./examples/orders/payment ./examples/orders/projector

FROM gcr.io/distroless/static-debian12:nonroot AS examples
COPY --from=build-examples /examples /examples
CMD ["/examples/service"]

FROM gcr.io/distroless/static-debian12:nonroot
COPY --from=build /outrelay /outrelay
USER 65532:65532
EXPOSE 9464
ENTRYPOINT ["/outrelay"]
CMD ["run"]
