terraform {
  required_version = ">= 1.11"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "5.100.0"
    }
  }
}

provider "aws" {
  region = var.region

  # Every resource bears them, and `infra/left` finds by them what was left behind.
  default_tags {
    tags = local.tags
  }

  # For a mock cloud only. Its requests are signed with keys that mean nothing.
  access_key                  = var.mock_endpoint == "" ? null : "mock"
  secret_key                  = var.mock_endpoint == "" ? null : "mock"
  skip_credentials_validation = var.mock_endpoint != ""
  skip_metadata_api_check     = var.mock_endpoint == "" ? null : "true"
  skip_requesting_account_id  = var.mock_endpoint != ""
  max_retries                 = var.mock_endpoint == "" ? null : 2

  dynamic "endpoints" {
    for_each = var.mock_endpoint == "" ? [] : [var.mock_endpoint]
    content {
      ec2 = endpoints.value
      sts = endpoints.value
    }
  }
}

locals {
  tags = {
    project = "pqtail"
    run     = var.run
    expiry  = var.expiry
  }
}
