// Package zdeps keeps modules in go.mod until they are used.
package zdeps

import (
	_ "github.com/chromedp/chromedp"
)
