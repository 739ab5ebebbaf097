// Package webclient makes HTTP clients for servers outside of the deployment: collectors and registries. It does no I/O.
package webclient

import (
	"crypto/tls"
	"net/http"
	"time"
)

// NewTransport returns a transport with its own connections, which takes the proxy from the environment. tls may be nil. Programs in which
// outrelay is embedded may have replaced [http.DefaultTransport], by a value of any type.
func NewTransport(tls *tls.Config) *http.Transport {
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		TLSClientConfig:     tls,
		ForceAttemptHTTP2:   true,
		MaxIdleConns:        100,
		IdleConnTimeout:     90 * time.Second,
		TLSHandshakeTimeout: 10 * time.Second,
	}
}
