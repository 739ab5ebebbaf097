package config

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io/fs"
	"os"
)

// Client is the configuration of a TLS client, its files read now. It is nil for a nil TLS.
func (t *TLS) Client() (*tls.Config, error) {
	if t == nil {
		return nil, nil
	}
	if list := t.problems(); len(list) > 0 {
		return nil, &Problems{list}
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.ServerName, InsecureSkipVerify: t.Insecure}
	if t.CA != "" {
		pem, err := os.ReadFile(t.CA)
		if err != nil {
			return nil, err
		}
		c.RootCAs = x509.NewCertPool()
		c.RootCAs.AppendCertsFromPEM(pem)
	}
	if t.Cert != "" {
		pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
		if err != nil {
			return nil, err
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
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
