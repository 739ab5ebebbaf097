// Package msk supplies the tokens with which a client logs in to Amazon MSK by IAM. Brokers of MSK accept them as SASL OAUTHBEARER,
// on the port for IAM:
//
//	consumer.WithSASL(consumer.SASL{Mechanism: "oauthbearer", Token: msk.Token("eu-west-1")})
//
// The package is separate because it links the AWS SDK.
package msk

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/aws/aws-msk-iam-sasl-signer-go/signer"
	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/config"

	"github.com/outrelay/outrelay/pkg/bearer"
)

// Token returns a Source of tokens for clusters in region, such as "eu-west-1". The credentials come from the default chain of the
// AWS SDK: environment, shared files, web identity of a pod, container, or instance. The SDK renews them. A token is signed for
// each connection, without a request.
func Token(region string) bearer.Source {
	loader := &loader{region: region}
	return func(ctx context.Context) (string, error) {
		credentials, err := loader.load(ctx)
		if err != nil {
			return "", err
		}
		token, _, err := signer.GenerateAuthTokenFromCredentialsProvider(ctx, region, credentials)
		if err != nil {
			return "", fmt.Errorf("signing a token for MSK in %s: %w", region, err)
		}
		return token, nil
	}
}

// loader loads the chain of credentials at the first use, and again after an error.
type loader struct {
	region string

	mu          sync.Mutex
	credentials aws.CredentialsProvider
}

func (l *loader) load(ctx context.Context) (aws.CredentialsProvider, error) {
	if l.region == "" {
		return nil, errors.New("signing a token for MSK: the region is empty")
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	if l.credentials == nil {
		cfg, err := config.LoadDefaultConfig(ctx, config.WithRegion(l.region))
		if err != nil {
			return nil, fmt.Errorf("loading the AWS configuration: %w", err)
		}
		l.credentials = cfg.Credentials
	}
	return l.credentials, nil
}
