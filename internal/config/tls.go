package config

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"
)

// Client is the configuration of a TLS client, its files read now. The certificate it shows is looked for again at each
// handshake; the authorities it trusts are those of now: see [TLS.Source]. It is nil for a nil TLS.
func (t *TLS) Client() (*tls.Config, error) {
	next, err := t.Source(slog.New(slog.DiscardHandler), nil)
	if next == nil || err != nil {
		return nil, err
	}
	return next(), nil
}

// Source gives the configuration for the next connection. Each call looks whether one of the files was changed, which
// costs a stat of each, and reads them if so: a certificate that was renewed, or an authority that was added or taken
// away, counts from the next connection on, and connections that are open stay as they are. Files that cannot be used,
// such as a pair of which one half was written so far, are told to log once, and the last good ones go on being used.
// After each change told, unless nil, is called with whether the files could be used; it must not block.
//
// What Source returns is nil for a nil TLS and may be called from any goroutine; the result is not to be changed.
func (t *TLS) Source(log *slog.Logger, told func(ok bool)) (func() *tls.Config, error) {
	if t == nil {
		return nil, nil
	}
	if list := t.problems(); len(list) > 0 {
		return nil, &Problems{list}
	}
	if told == nil {
		told = func(bool) {}
	}
	f := &tlsFiles{of: *t, log: log, told: told}
	f.seen = f.look()
	var err error
	if f.now, err = f.read(); err != nil {
		return nil, err
	}
	return f.next, nil
}

// tlsFiles are the files of one side of a connection, and what was made of them last.
type tlsFiles struct {
	of   TLS
	log  *slog.Logger
	told func(ok bool)

	mu   sync.Mutex
	seen [3]sighting
	now  *tls.Config
}

// sighting tells versions of a file apart. A file that is replaced by another name's, as Kubernetes does it, differs in
// the time of its change.
type sighting struct {
	changed time.Time
	size    int64
}

func (f *tlsFiles) look() (s [3]sighting) {
	for i, path := range []string{f.of.CA, f.of.Cert, f.of.Key} {
		if path == "" {
			continue
		}
		if info, err := os.Stat(path); err == nil {
			s[i] = sighting{info.ModTime(), info.Size()}
		}
	}
	return s
}

func (f *tlsFiles) next() *tls.Config {
	f.mu.Lock()
	defer f.mu.Unlock()
	seen := f.look()
	if seen == f.seen {
		return f.now
	}
	f.seen = seen
	fresh, err := f.read()
	f.told(err == nil)
	if err != nil {
		f.log.Warn("changed TLS files cannot be used; the last good ones stay in use", "ca", f.of.CA, "cert", f.of.Cert, "err", err)
		return f.now
	}
	f.now = fresh
	f.log.Info("TLS files have changed and are used from now on", "ca", f.of.CA, "cert", f.of.Cert, "expires", expiry(fresh))
	return f.now
}

func (f *tlsFiles) read() (*tls.Config, error) {
	if list := f.of.problems(); len(list) > 0 {
		return nil, &Problems{list}
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: f.of.ServerName, InsecureSkipVerify: f.of.Insecure}
	if f.of.CA != "" {
		text, err := os.ReadFile(f.of.CA)
		if err != nil {
			return nil, err
		}
		c.RootCAs = x509.NewCertPool()
		c.RootCAs.AppendCertsFromPEM(text)
	}
	if f.of.Cert == "" {
		return c, nil
	}
	pair, err := tls.LoadX509KeyPair(f.of.Cert, f.of.Key)
	if err != nil {
		return nil, err
	}
	c.Certificates = []tls.Certificate{pair}
	// For whoever keeps one configuration for all of its connections.
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return &f.next().Certificates[0], nil
	}
	return c, nil
}

// expiry is when the certificate that is shown ends; the zero time without one.
func expiry(c *tls.Config) (end time.Time) {
	if len(c.Certificates) > 0 && c.Certificates[0].Leaf != nil {
		end = c.Certificates[0].Leaf.NotAfter
	}
	return end
}

// Expiry is the first end of validity among the certificates in the files, and which file it is in; the zero time if
// there are none or they cannot be read.
func (t *TLS) Expiry() (end time.Time, file string) {
	if t == nil {
		return end, ""
	}
	if own := firstEnd(t.Cert, true); !own.IsZero() {
		end, file = own, t.Cert
	}
	if trusted := firstEnd(t.CA, false); !trusted.IsZero() && (end.IsZero() || trusted.Before(end)) {
		end, file = trusted, t.CA
	}
	return end, file
}

// firstEnd is the first end among the certificates of a file or, with all false, the last: of the authorities that are
// trusted an old one may well stand beside its successor.
func firstEnd(path string, all bool) (end time.Time) {
	text, err := os.ReadFile(path)
	if path == "" || err != nil {
		return end
	}
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err == nil && (end.IsZero() || cert.NotAfter.Before(end) == all) {
			end = cert.NotAfter
		}
	}
	return end
}

func (t *TLS) problems() (list []Problem) {
	if t.CA != "" {
		if pem, err := os.ReadFile(t.CA); err != nil {
			list = append(list, Problem{"ca", "the file " + t.CA + " cannot be read: " + cause(err), ""})
		} else if !x509.NewCertPool().AppendCertsFromPEM(pem) {
			list = append(list, Problem{"ca", "the file " + t.CA + " holds no certificate", "expected PEM certificates"})
		}
	}
	switch {
	case t.Cert != "" && t.Key == "":
		list = append(list, Problem{"key", "required beside cert and not set", "give the file with the private key"})
	case t.Cert == "" && t.Key != "":
		list = append(list, Problem{"cert", "required beside key and not set", "give the file with the certificate"})
	case t.Cert != "":
		if _, err := tls.LoadX509KeyPair(t.Cert, t.Key); err != nil {
			list = append(list, Problem{"cert", "the pair " + t.Cert + " and " + t.Key + " cannot be used: " + cause(err), "expected a PEM certificate and its unencrypted PEM key"})
		}
	}
	return list
}

// cause is the reason of a file error without the path, which the caller names already.
func cause(err error) string {
	var why *fs.PathError
	if errors.As(err, &why) {
		return why.Err.Error()
	}
	return err.Error()
}
