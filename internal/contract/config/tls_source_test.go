package config

import (
	"bytes"
	"crypto/tls"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// Changed files apply from the next call. Incomplete files are logged once, and the last good ones stay in use.
func TestTLSSourceFollowsItsFiles(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	cert, key := writeKeyPair(t)
	var counted []bool
	next, err := (&TLS{CA: cert, Cert: cert, Key: key}).Source(slog.New(slog.NewTextHandler(&log, nil)), func(ok bool) { counted = append(counted, ok) })
	if err != nil {
		t.Fatal(err)
	}
	first := next()
	if next() != first || first.MinVersion != tls.VersionTLS12 || first.InsecureSkipVerify || log.Len() != 0 {
		t.Fatalf("configuration %+v, log %q, want an empty log", first, log.String())
	}
	shown := func(c *tls.Config) string {
		t.Helper()
		pair, err := c.GetClientCertificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		return string(pair.Certificate[0])
	}
	old := shown(first)

	cert2, key2 := writeKeyPair(t)
	move := func(from, to string) {
		t.Helper()
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, text, 0o600); err != nil {
			t.Fatal(err)
		}
		// The modification time must differ, even with a coarse clock of the file system.
		later := time.Now().Add(time.Duration(len(log.Bytes())+1) * time.Second)
		if err := os.Chtimes(to, later, later); err != nil {
			t.Fatal(err)
		}
	}

	// The key is still the old one.
	move(cert2, cert)
	if next() != first || shown(first) != old {
		t.Error("half a pair is used")
	}
	warned := log.String()
	if !strings.Contains(warned, "level=WARN") || !strings.Contains(warned, "cannot be used") || strings.Contains(warned, "PRIVATE") {
		t.Errorf("log %q, want a warning without the key", warned)
	}
	if next() != first || log.String() != warned {
		t.Errorf("the warning is repeated: %q", log.String())
	}

	move(key2, key)
	second := next()
	if second == first || shown(second) == old || shown(first) == old || second.RootCAs.Equal(first.RootCAs) {
		t.Error("the new files are not used")
	}
	if !strings.Contains(log.String(), "have changed and apply to new connections") {
		t.Errorf("log %q, want the change of the files", log.String())
	}
	if !slices.Equal(counted, []bool{false, true}) {
		t.Errorf("counted %v", counted)
	}
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	if next() != second {
		t.Error("files that are away take the certificate away")
	}
}

func TestTLSExpiry(t *testing.T) {
	t.Parallel()
	if end, _ := (*TLS)(nil).Expiry(); !end.IsZero() {
		t.Errorf("%v", end)
	}
	cert, key := writeKeyPair(t)
	end, file := (&TLS{CA: cert, Cert: cert, Key: key}).Expiry()
	if left := time.Until(end); file != cert || left <= 0 || left > time.Hour {
		t.Errorf("%v %s", left, file)
	}
	if end, _ := (&TLS{CA: "/no/such"}).Expiry(); !end.IsZero() {
		t.Errorf("%v", end)
	}
}
