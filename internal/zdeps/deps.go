// Package zdeps keeps modules in go.mod until they are used.
package zdeps

import (
	_ "github.com/chromedp/chromedp"
	_ "github.com/danielgtaylor/huma/v2"
	_ "github.com/danielgtaylor/huma/v2/adapters/humago"
	_ "github.com/spf13/cobra/doc"
	_ "golang.org/x/time/rate"
)
