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

// ClientConfig reads the files and returns the configuration of a TLS client. Each handshake checks the
// client certificate for changes; the trusted authorities do not change. See [TLS.Source] for both.
// ClientConfig returns nil for a nil TLS.
func (t *TLS) ClientConfig() (*tls.Config, error) {
	source, err := t.Source(slog.New(slog.DiscardHandler), nil)
	if source == nil || err != nil {
		return nil, err
	}
	return source(), nil
}

// Source returns a function that returns the configuration for the next connection. Each call checks
// the files for changes, which costs one stat per file, and reads changed files. A renewed certificate,
// or a change of the authorities, applies from the next connection on. Open connections do not change.
//
// If changed files cannot be used, for example because only one file of a pair was written yet, the
// problem is logged once and the last good files stay in use. onReload, unless it is nil, is called
// after each change with the result of the reload. It must not block.
//
// Source returns a nil function for a nil TLS. The function is safe for concurrent use. The caller must
// not change the configuration that it returns.
func (t *TLS) Source(log *slog.Logger, onReload func(ok bool)) (func() *tls.Config, error) {
	if t == nil {
		return nil, nil
	}
	if list := t.findProblems(); len(list) > 0 {
		return nil, &Problems{List: list}
	}
	if onReload == nil {
		onReload = func(bool) {}
	}

	files := &tlsFiles{paths: *t, log: log, onReload: onReload}
	files.versions = files.statFiles()
	var err error
	if files.config, err = files.readConfig(); err != nil {
		return nil, err
	}
	return files.currentConfig, nil
}

// tlsFiles holds the files for one side of a connection and the configuration that was last read from them.
type tlsFiles struct {
	paths    TLS
	log      *slog.Logger
	onReload func(ok bool)

	mu       sync.Mutex
	versions [3]fileVersion
	config   *tls.Config
}

// fileVersion identifies a version of a file. If a file is replaced through a symbolic link, as
// Kubernetes does, the modification time differs.
type fileVersion struct {
	changed time.Time
	size    int64
}

func (f *tlsFiles) statFiles() (versions [3]fileVersion) {
	for i, path := range []string{f.paths.CA, f.paths.Cert, f.paths.Key} {
		if path == "" {
			continue
		}
		if info, err := os.Stat(path); err == nil {
			versions[i] = fileVersion{info.ModTime(), info.Size()}
		}
	}
	return versions
}

// currentConfig reads the files again if they have changed, and returns the last good configuration.
func (f *tlsFiles) currentConfig() *tls.Config {
	f.mu.Lock()
	defer f.mu.Unlock()

	// Comparing the versions costs two calls of stat, so it is done for each connection.
	versions := f.statFiles()
	if versions == f.versions {
		return f.config
	}

	// Stored even if the files turn out to be unusable, so that they are reported only once.
	f.versions = versions
	config, err := f.readConfig()
	f.onReload(err == nil)
	if err != nil {
		f.log.Warn("changed TLS files cannot be used; the last good ones stay in use",
			"ca", f.paths.CA, "cert", f.paths.Cert, "error", err)
		return f.config
	}

	f.config = config
	f.log.Info("TLS files have changed and apply to new connections",
		"ca", f.paths.CA, "cert", f.paths.Cert, "expires", certExpiry(config))
	return f.config
}

func (f *tlsFiles) readConfig() (*tls.Config, error) {
	if list := f.paths.findProblems(); len(list) > 0 {
		return nil, &Problems{List: list}
	}

	tlsConfig := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: f.paths.ServerName, InsecureSkipVerify: f.paths.Insecure}
	if f.paths.CA != "" {
		var err error
		if tlsConfig.RootCAs, err = readCertPool(f.paths.CA); err != nil {
			return nil, err
		}
	}
	if f.paths.Cert == "" {
		return tlsConfig, nil
	}

	pair, err := tls.LoadX509KeyPair(f.paths.Cert, f.paths.Key)
	if err != nil {
		return nil, err
	}
	tlsConfig.Certificates = []tls.Certificate{pair}

	// A caller of ClientConfig uses one configuration for all its connections, and still needs a renewed certificate.
	tlsConfig.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return &f.currentConfig().Certificates[0], nil
	}
	return tlsConfig, nil
}

// certExpiry returns the expiry of the client certificate, or the zero time without one.
func certExpiry(tlsConfig *tls.Config) (end time.Time) {
	if len(tlsConfig.Certificates) > 0 && tlsConfig.Certificates[0].Leaf != nil {
		end = tlsConfig.Certificates[0].Leaf.NotAfter
	}
	return end
}

// Expiry returns the earliest expiry of the certificates in the files, and its file. It returns the
// zero time if there are no certificates or they cannot be read.
func (t *TLS) Expiry() (end time.Time, file string) {
	if t == nil {
		return end, ""
	}

	if own, _ := readExpiries(t.Cert); !own.IsZero() {
		end, file = own, t.Cert
	}
	// A file of trusted authorities may contain an expired authority together with its successor, so only the latest counts.
	if _, trusted := readExpiries(t.CA); !trusted.IsZero() && (end.IsZero() || trusted.Before(end)) {
		end, file = trusted, t.CA
	}
	return end, file
}

// readExpiries returns the earliest and the latest expiry of the certificates in a file, or zero times if it has none.
func readExpiries(path string) (earliest, latest time.Time) {
	text, err := os.ReadFile(path)
	if path == "" || err != nil {
		return earliest, latest
	}

	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			continue
		}
		if earliest.IsZero() || cert.NotAfter.Before(earliest) {
			earliest = cert.NotAfter
		}
		if cert.NotAfter.After(latest) {
			latest = cert.NotAfter
		}
	}
	return earliest, latest
}

// readCertPool returns the certificates of a PEM file. The pool may be empty.
func readCertPool(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}

	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	return pool, nil
}

// findProblems returns the problems of the files. The paths are relative to the section.
func (t *TLS) findProblems() (list []Problem) {
	if t.CA != "" {
		pool, err := readCertPool(t.CA)
		if err != nil {
			list = append(list, Problem{Path: "ca", Found: describeUnreadable(t.CA, err), absent: errors.Is(err, fs.ErrNotExist)})
		} else if pool.Equal(x509.NewCertPool()) {
			list = append(list, Problem{Path: "ca", Found: "the file " + t.CA + " holds no certificate", Allowed: "expected PEM certificates"})
		}
	}

	// A pair is checked as a whole, because each half may be valid alone.
	switch {
	case t.Cert != "" && t.Key == "":
		list = append(list, Problem{Path: "key", Found: "required with cert and not set", Allowed: "set the file with the private key"})
	case t.Cert == "" && t.Key != "":
		list = append(list, Problem{Path: "cert", Found: "required with key and not set", Allowed: "set the file with the certificate"})
	case t.Cert != "":
		if _, err := tls.LoadX509KeyPair(t.Cert, t.Key); err != nil {
			list = append(list, Problem{
				Path: "cert", Found: "the pair " + t.Cert + " and " + t.Key + " cannot be used: " + fileErrorCause(err),
				Allowed: "expected a PEM certificate and its unencrypted PEM key", absent: errors.Is(err, fs.ErrNotExist),
			})
		}
	}
	return list
}

// describeUnreadable returns the problem of a file whose reading failed with err.
func describeUnreadable(file string, err error) string {
	return "the file " + file + " cannot be read: " + fileErrorCause(err)
}

// fileErrorCause returns the reason of a file error without the path, which the caller names itself.
func fileErrorCause(err error) string {
	var pathError *fs.PathError
	if errors.As(err, &pathError) {
		return pathError.Err.Error()
	}
	return err.Error()
}
