package main

import (
	"crypto/x509"
	"os"
	"os/exec"
	"testing"
)

// Without certificate authorities of the system, as in the image of a release, the program trusts the authorities that it contains.
func TestCertificateAuthoritiesAreBuiltIn(t *testing.T) {
	t.Parallel()
	const none = "/nowhere"

	// A process reads the authorities of the system only once, so this test runs itself in a process that has none.
	if os.Getenv("SSL_CERT_FILE") != none {
		c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
		c.Env = append(os.Environ(), "SSL_CERT_FILE="+none, "SSL_CERT_DIR="+none)
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}

	pool, err := x509.SystemCertPool()
	if err != nil || pool.Equal(x509.NewCertPool()) {
		t.Errorf("the program trusts no certificate authority: %v", err)
	}
}
