// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// authority signs the certificates of a control plane.
type authority struct {
	certificate *x509.Certificate
	key         crypto.Signer
}

// lifetime is longer than any test, and tolerates clock skew.
const lifetime = 24 * time.Hour

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	a := &authority{key: key}
	der, err := a.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "kubernetes"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, key.Public())
	if err != nil {
		return nil, err
	}
	a.certificate, err = x509.ParseCertificate(der)
	return a, err
}

// sign completes a certificate. The first one is the authority's own.
func (a *authority) sign(c *x509.Certificate, public crypto.PublicKey) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	c.SerialNumber = serial
	c.NotBefore, c.NotAfter = time.Now().Add(-lifetime), time.Now().Add(lifetime)
	parent := a.certificate
	if parent == nil {
		parent = c
	}
	return x509.CreateCertificate(rand.Reader, c, parent, public, a.key)
}

// pair is a certificate with its key, both in PEM.
type pair struct{ certificate, key []byte }

// client returns a client certificate for a user and a group.
func (a *authority) client(user, group string) (pair, error) {
	c := &x509.Certificate{
		Subject: pkix.Name{CommonName: user}, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if group != "" {
		c.Subject.Organization = []string{group}
	}
	return a.issue(c)
}

// server returns a server certificate for these addresses.
func (a *authority) server(addresses ...net.IP) (pair, error) {
	return a.issue(&x509.Certificate{
		Subject: pkix.Name{CommonName: "kube-apiserver"}, IPAddresses: addresses,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
}

func (a *authority) issue(c *x509.Certificate) (p pair, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return p, err
	}
	der, err := a.sign(c, key.Public())
	if err != nil {
		return p, fmt.Errorf("sign certificate of %s: %w", c.Subject.CommonName, err)
	}
	p.certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	p.key, err = privatePEM(key)
	return p, err
}

func (a *authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.certificate.Raw})
}

func privatePEM(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), err
}

// write saves the pair as <dir>/<name>.crt and <name>.key.
func (p pair) write(dir, name string) (certificate, key string, err error) {
	certificate, key = filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	if err := os.WriteFile(certificate, p.certificate, 0o600); err != nil {
		return "", "", err
	}
	return certificate, key, os.WriteFile(key, p.key, 0o600)
}
